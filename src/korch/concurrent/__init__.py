"""Plans whose kernels run at the same time on parts of the threads."""
