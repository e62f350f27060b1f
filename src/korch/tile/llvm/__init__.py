"""Prints tile programs as LLVM IR."""
