"""Plans -> executables that are checked and timed end to end; the fastest one whose results are right."""
