"""Stands in for torch_npu, so that the binding for it builds: it has no device."""
