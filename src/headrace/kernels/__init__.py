"""The operations a model is made of, for each kind of device, behind `headrace.kernels.ops`."""
