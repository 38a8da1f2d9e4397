"""A stub of torch_npu against which the binding builds; it has no device."""
