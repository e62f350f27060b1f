"""The operating system: files, processes, cores, shared libraries, time."""
