"""What printers compute from tile programs: fusion, loop bounds, prefetches, layouts, partition among threads."""
