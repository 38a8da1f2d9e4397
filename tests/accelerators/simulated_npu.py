"""A simulated NPU: torch's Python backend for PrivateUse1, renamed "npu"; every operator runs on the CPU.

``install()`` renames the backend for the whole process, so it needs its own process. As on a real device, operators
reject mixed NPU and CPU tensors, and ``numpy()`` requires ``cpu()`` first. Not supported by torch 2.13's mechanism:

- Several devices in one process: the device guard counts one device and the autograd engine asserts the index, so
  ``npu:1`` is accepted as a device, but tensors report ``npu:0``. Ranks on several "devices" are processes.
- ``torch.accelerator``'s memory functions and ``synchronize``, whose C++ side cannot be implemented in Python;
  ``torch.npu`` provides them, and ``synchronize`` is replaced.
- ``torch.Generator("npu")``: random numbers come from the CPU generator, so runs equal those on the CPU.
- Inference tensors: creating a view of one in Python fails on its version counter, so tensors created in inference
  mode are ordinary tensors here.
- Pinned memory and sparse tensors.

Collectives on NPU tensors need a process group with a backend for NPUs, as on a real device: gloo has none. The backend
``hccl``, over gloo, stands in for Huawei's; it has no means, and a group of it alone no CPU tensors.
"""

import weakref

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

DEVICES = 4
MEMORY = 32 << 30
AUTOCAST = ("mm", "matmul", "linear", "bmm", "addmm")
MIXING = ("copy_", "to", "index", "index_put", "index_put_", "_index_put_impl_", "_has_compatible_shallow_copy_type")

_libraries = []  # a library that is garbage-collected unregisters its kernels
_alive = weakref.WeakSet()
calls = set()
"""Names of the operators that ran."""


class NPUTensor(torch.Tensor):
    """A CPU tensor (``raw``) that reports the NPU as its device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw, requires_grad=False):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device="npu:0",
            requires_grad=requires_grad,
            dispatch_sizes_strides_policy="sizes",  # the shape is that of raw, which out= may change
        )
        tensor.raw = raw
        _alive.add(tensor)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __repr__(self):
        return f"{self.raw!r}[:-1], device='npu:0')"

    def __hash__(self):
        return id(self)

    def to(self, *args, **kwargs):
        return super().to(*tree_map(_as_first_device, args), **tree_map(_as_first_device, kwargs))

    def data_ptr(self):
        return self.raw.data_ptr()

    def tolist(self):
        return self.detach().cpu().tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("can't convert npu:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return self.detach().cpu().numpy()

    def __array__(self, dtype=None):
        return self.numpy()

    def __reduce_ex__(self, protocol):
        # A file contains CPU tensors; map_location of torch.load chooses the device.
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = NPUTensor(self.raw.clone(), self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            copy.grad = None if self.grad is None else self.grad.clone()
            memo[id(self)] = copy
        return memo[id(self)]


def _as_first_device(value):
    """Return the device that tensors report, so that a tensor on a rank's own device stays the same object."""
    is_npu = isinstance(value, str | torch.device) and torch.device(value).type == "npu"
    return torch.device("npu", 0) if is_npu else value


def _unwrap(value):
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return value.raw if isinstance(value, NPUTensor) else value


@torch.inference_mode(False)
def run(func, args, kwargs):
    """Run an operator on the wrapped CPU tensors and wrap the results, unless the CPU was requested."""
    calls.add(func.__name__)
    flat, spec = tree_flatten((args, kwargs))
    inside = [value for value in flat if isinstance(value, NPUTensor)]
    known = {id(value.raw): value for value in inside}
    known.update((id(value), value) for value in flat if type(value) is torch.Tensor)
    _check_mixed(func, flat, inside)

    if func is torch.ops.aten.is_pinned.default:
        return False
    if func.namespace == "c10d":
        flat = [_as_hccl(value) if isinstance(value, torch.ScriptObject) else value for value in flat]
    plain_args, plain_kwargs = tree_unflatten([_unwrap(value) for value in flat], spec)
    out = func(*plain_args, **plain_kwargs)
    devices = [value for value in flat if isinstance(value, torch.device)]
    moves = func.overloadpacket is torch.ops.aten.to  # not decomposed in inference mode
    if moves and not devices:
        devices = [args[1].device if isinstance(args[1], torch.Tensor) else args[0].device]
    wraps = devices[0].type == "npu" if devices else bool(inside)

    def wrap(value):
        if not isinstance(value, torch.Tensor) or isinstance(value, NPUTensor):
            return value
        if id(value) in known:  # in-place operators and out= return their arguments
            if not moves or isinstance(known[id(value)], NPUTensor) == wraps:
                return known[id(value)]
            value = value.clone()  # on the CPU, the move was a no-op
        return NPUTensor(value) if wraps else value

    return tree_map(wrap, out)


def _as_hccl(value):
    """Replace a process group by one that passes CPU tensors to its backend for NPUs."""
    if "ProcessGroup" not in str(value._type()):
        return value
    group = dist.ProcessGroup.unbox(value)
    backend = group._get_backend(torch.device("npu"))  # raises as on a real device if the group has none
    inner = dist.ProcessGroup(dist.HashStore(), group.rank(), group.size())
    inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return inner.boxed()


def _check_mixed(func, flat, inside):
    """Reject CPU tensors mixed with NPU tensors as a device does, except for numbers, copies and indices."""
    free = ("copy_", "_copy_from", "index", "index_put", "_index_put_impl_", "set_")
    free = (*free, "_has_compatible_shallow_copy_type")
    if func.namespace != "aten" or not inside or func.overloadpacket.__name__ in free:
        return
    for value in flat:
        if type(value) is torch.Tensor and value.device.type == "cpu" and value.dim() > 0:
            raise RuntimeError(f"{func}: expected all tensors on the same device, but found npu:0 and cpu")


class NPUModule:
    """Stands in for the module that torch_npu registers as ``torch.npu``."""

    current = 0

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return DEVICES

    def current_device(self):
        return self.current

    def set_device(self, device):
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < DEVICES:
            raise RuntimeError(f"npu:{index} of {DEVICES}")
        NPUModule.current = index

    def synchronize(self, device=None):
        pass

    def empty_cache(self):
        pass

    def memory_allocated(self, device=None):
        storages = {tensor.raw.untyped_storage().data_ptr(): tensor.raw.untyped_storage().nbytes() for tensor in _alive}
        return sum(storages.values())

    def memory_stats(self, device=None):
        return {"allocated_bytes.all.current": self.memory_allocated()}

    def mem_get_info(self, device=None):
        return MEMORY - self.memory_allocated(), MEMORY

    def manual_seed(self, seed):
        pass

    manual_seed_all = manual_seed

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)

    def get_rng_state_all(self):
        return [torch.get_rng_state()]

    def set_rng_state_all(self, states):
        torch.set_rng_state(states[0])

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


def _make_autocast_kernel(name):
    operator = getattr(torch.ops.aten, name).default
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args, **kwargs):
        dtype = torch.get_autocast_dtype("npu")

        def cast(value):
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def install():
    """Register the device; call once per process."""
    if _libraries:
        return
    # Not in torch 2.8, with which only the fast tests run.
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("npu", backend_module=NPUModule())
    torch.accelerator.synchronize = lambda device=None, /: None
    dist.Backend.register_backend("hccl", dist.ProcessGroupGloo, devices=["npu"])
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda operator, *args, **kwargs: run(operator, args, kwargs), "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    # torch.tensor(…, device="npu") disables tensor subclasses while copying, so the fallback is not found.
    aten.impl("copy_", lambda *args, **kwargs: run(torch.ops.aten.copy_.default, args, kwargs), "PrivateUse1")
    for name in AUTOCAST:
        aten.impl(name, _make_autocast_kernel(name), "AutocastPrivateUse1")
    _libraries.extend([everything, aten])
