"""Plans -> executables that are checked and timed end to end; the fastest one with correct results is kept."""
