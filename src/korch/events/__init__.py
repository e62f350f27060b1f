"""Kernels of a plan -> tasks with the bytes that they touch -> events that order them -> their queues."""
