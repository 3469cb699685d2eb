"""A computing device for the real torch_npu, without an NPU.

torch_npu runs as on a machine with NPUs, over CANN libraries of our own (``libraries.py``): device memory is
host memory, streams are queues, HCCL sends files. A dispatch mode (``mode.py``) computes values with CPU
kernels over the same memory. README.md in this folder lists the limits of such a run.
"""
