"""Support for models that are only partly graphs of static tensors: the host runs the other parts.

The host is ONNX Runtime, which supports data-dependent shapes, sequences, strings and control flow. If it
refuses a part, the reference evaluator of ONNX runs it.
"""
