# SPDX-License-Identifier: Apache-2.0
"""Which backend runs a call.

An eager call of plain tensors goes straight to the native kernel. A call that is being traced, or that a mode, a
functorch transform or a tensor subclass wants to see, goes through ``torch.ops.gdn.<name>``, whose implementation comes
back to :func:`run_on_backend`. A call that needs a gradient never gets this far (see :func:`wants_gradient`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from . import _registry, _validate
from ._log import log_once

Kernel = Callable[..., None]

_AUTOMATIC = ""
_FUSED_DECODE = ("fused_gdn_decode_post_conv_mtp", "fused_gdn_decode_post_conv_mtp_replay")

_forced_here: ContextVar[str | None] = ContextVar("gdn_backend", default=None)
_default: str | None = None  # the process-wide choice; None until the environment has been read

_recorders: list[Counter[tuple[str, str]]] = []
_fast: dict[str | None, dict[str, Kernel]] = {}  # by choice: op name -> native CPU kernel

_written: dict[str, list[int]] = {}  # op name -> positions of the arguments that its schema marks as changed in place

# op name -> reference implementation over the arguments of torch.ops.gdn.<name>; filled by _schema
reference_kernels: dict[str, Kernel] = {}

_is_compiling = torch.compiler.is_compiling
_is_dynamo = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.maybe_current_level
_inference_mode = torch.is_inference_mode_enabled
_is_tracing = torch._C._is_tracing


def _version_counter() -> Callable[[list[torch.Tensor]], None]:
    """Return torch's increment_version, without its Python layer where torch has it for lists."""
    try:
        torch._C._increment_version([])
    except TypeError:
        return torch.autograd.graph.increment_version
    return torch._C._increment_version


_increment_version = _version_counter()


def _requires_grad(*tensors: object) -> bool:
    return any(getattr(tensor, "requires_grad", False) for tensor in tensors)


# The same in C, where torch has it; what a compiler traces cannot call it.
any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _requires_grad)


# --- choosing ---------------------------------------------------------------------------------------------------------


class use_backend:
    """Force one backend, for the process (plain call) or for a block (``with``); None restores the default.

    A forced backend that cannot run a call raises NotImplementedError, naming the unmet constraint, instead of falling
    back. As a context manager the choice holds for the current thread or task only. A plain call holds at once where
    it is made, and in other threads, unless they have a choice of their own, as soon as its result is dropped.

    Args:
        name: ``"reference"``, ``"cpu"``, ``"cuda"`` or another name that :func:`gdn_core.backends` lists; None: what
            ``GDN_BACKEND`` says, or whichever takes a call.

    Raises:
        ValueError: no backend has that name.
        RuntimeError: that backend cannot run here; the message says why and what to install.

    Example:
        >>> import gdn_core
        >>> with gdn_core.use_backend("reference"):
        ...     pass
    """

    _is_plain_call = False

    def __init__(self, name: str | None) -> None:
        self.name = _environment_choice() if name is None else name
        if name is not None:
            _require(name, "backend")
        self._tokens: list[Token[str | None]] = [_forced_here.set(self.name)]
        self._is_plain_call = True  # until __enter__ shows that it is not

    def __enter__(self) -> use_backend:
        if not self._is_plain_call or _forced_here.get() != self.name:
            self._tokens.append(_forced_here.set(self.name))
        self._is_plain_call = False
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(ValueError):  # left in another context (a generator closed elsewhere): nothing here to undo
            _forced_here.reset(self._tokens.pop())

    def __del__(self) -> None:
        # The constructor cannot know whether a with statement follows, and other threads must not see a choice that
        # is only for a block: so a plain call reaches them here, when its result turns out to be of no more use.
        if self._is_plain_call:
            global _default
            _default = self.name


def _environment_choice() -> str:
    """Return the backend that GDN_BACKEND names, or the empty string."""
    name = _registry.settings().backend or _AUTOMATIC
    if name != _AUTOMATIC:
        _require(name, "GDN_BACKEND")
    return name


def _require(name: str, origin: str) -> None:
    """Check that a backend exists and can run here; ``origin`` says where its name came from."""
    if name not in _registry.names():
        raise ValueError(f"{origin}: expected one of {', '.join(_registry.names())}, got {name!r}")
    info = _registry.info(name)
    if not info.available:
        remedy = f"; {info.install}" if info.install else ""
        raise RuntimeError(f"{origin}: backend {name!r} cannot run here: {info.reason}{remedy}")


def _choice() -> str:
    """Return the forced backend's name, or the empty string."""
    global _default
    if _default is None:
        _default = _environment_choice()
    here = _forced_here.get()
    return _default if here is None else here


def _declines(name: str, op: str) -> str | None:
    """Return why backend ``name`` has no kernel for ``op`` at all, or None."""
    info = _registry.info(name)
    if not info.available:
        return info.reason
    provider = _registry.provider(name)
    asked_for = _decode_kernel(op)
    if name in _registry.DECODE_KERNELS and asked_for not in (None, name):
        return f"GDN_DECODE_KERNEL={asked_for}"
    if provider is not None and op not in provider.ops:
        return f"has no kernel for {op}"
    return None


def _wrong_device(name: str, device: torch.device) -> str | None:
    provider = _registry.provider(name)
    if provider is None or device.type in provider.device_types:
        return None
    return f"runs {', '.join(provider.device_types)} tensors, these are on {device}"


def _try(name: str, op: str, flat: Sequence[Any], device: torch.device, *, dry_run: bool) -> str | None:
    """Run ``op`` on a native backend, or only check; return why it declined, or None when it ran (would run)."""
    reason = _declines(name, op) or _wrong_device(name, device)
    provider = _registry.provider(name)
    if reason is not None or provider is None:
        return reason or "is unavailable"
    try:
        if device.type != "cpu" and not dry_run and _validate.debugging():
            provider.ops[op](*flat, dry_run=True)
            _validate.check(op, flat)  # reads what lies on the device, which a kernel's own checks leave alone
        provider.ops[op](*flat, dry_run=dry_run)
    except NotImplementedError as error:
        return str(error)
    if not (dry_run or _inference_mode()):
        _mark_written(op, flat)
    return None


def _mark_written(op: str, flat: Sequence[Any]) -> None:
    """Tell autograd what a kernel wrote to, so that it refuses to use a saved tensor that is no longer the same."""
    positions = _written.get(op)
    if positions is None:
        arguments = getattr(torch.ops.gdn, op).default._schema.arguments
        positions = _written[op] = [
            i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write
        ]
    tensors = []
    for i in positions:  # a comprehension would be a function of its own
        if flat[i] is not None:
            tensors.append(flat[i])
    _increment_version(tensors)


# --- running ----------------------------------------------------------------------------------------------------------


def run(op: str, like: torch.Tensor, flat: tuple[Any, ...]) -> None:
    """Run ``op``, of which no gradient is required, over the arguments of ``torch.ops.gdn.<op>``; ``like`` is one."""
    if not run_eager(op, (like,), flat):
        run_watched(op, flat)


def run_update(op: str, inputs: tuple[object, ...], flat: tuple[Any, ...], *, writes: str) -> None:
    """Run what :func:`run_eager` has not, of an op that updates ``writes`` in place and so has no gradient."""
    if _grad_enabled():
        wants_gradient(op, inputs, flat, writes=writes)
    run_watched(op, flat)


def run_eager(op: str, inputs: tuple[object, ...], flat: tuple[Any, ...]) -> bool:
    """Run a call on the native CPU backend, if nothing but that has to see it and it takes it; say whether it has.

    Nearly all calls end here, often after work that has emptied the caches, when each function that is asked costs a
    microsecond: so every question is asked once, of C where C knows. False has changed nothing; what comes after finds
    out why.

    Args:
        op: name of the op.
        inputs: what may require a gradient, the first one being a tensor that tells the device.
        flat: the arguments of ``torch.ops.gdn.<op>``.
    """
    if _is_dynamo() or _recorders or not getattr(inputs[0], "is_cpu", False):
        return False
    if _num_dispatch_modes() or _is_tracing() or _functorch_level() is not None:
        return False
    if _grad_enabled() and (forward_ad._current_level >= 0 or any_requires_grad(*inputs)):
        return False
    here = _forced_here.get()
    try:
        kernel = _fast[_default if here is None else here][op]
    except KeyError:
        table = _fast_table()
        if op not in table:
            return False
        kernel = table[op]
    try:
        kernel(*flat)
    except NotImplementedError:  # declined before anything changed
        return False
    if not _inference_mode():
        _mark_written(op, flat)
    return True


def run_watched(op: str, flat: tuple[Any, ...]) -> None:
    """Run ``op`` where whoever has to see it does, or else on the first backend that takes it."""
    if not _is_compiling() and _recorders and _explaining.get():
        raise _Intercepted(op, flat, gradient=False, writes=None)
    if is_traced() or any(_is_subclass(tensor) for tensor in flat):
        getattr(torch.ops.gdn, op).default(*flat)
        return
    run_on_backend(op, flat)


def run_at_once(op: str, like: torch.Tensor, flat: tuple[Any, ...]) -> bool:
    """Run an op that is made of others where the native CPU backend may and can take it whole; say whether it has.

    Where that backend is forced, what it declines raises here: one of the others might decline it only after those
    before it have changed a state.
    """
    if not getattr(like, "is_cpu", False):
        return False
    here = _forced_here.get()
    try:
        kernel = _fast[_default if here is None else here][op]
    except KeyError:
        table = _fast_table()
        if op not in table:
            return False
        kernel = table[op]
    try:
        kernel(*flat)
    except NotImplementedError as error:
        if _choice() == _AUTOMATIC:
            return False
        raise NotImplementedError(f"{op}: the forced backend 'cpu' cannot run this call: {error}") from error
    if not _inference_mode():
        _mark_written(op, flat)
    if _recorders:
        _record(op, "cpu")
    return True


def is_traced() -> bool:
    """Tell whether a tracer, a mode or a functorch transform has to see a call as one op."""
    return _is_dynamo() or bool(_num_dispatch_modes()) or _is_tracing() or _functorch_level() is not None


def eager_kernels() -> dict[str, Kernel]:
    """Return the native kernels that calls of plain CPU tensors go to now; none while something has to see the calls.

    For code that calls them one after the other, with arguments that it has checked: what :func:`run` would find out
    anew at every call holds for all of them. Who writes to tensors this way says so with :func:`mark_written`.
    """
    if _recorders or is_traced():
        return {}
    here = _forced_here.get()
    table = _fast.get(_default if here is None else here)
    return _fast_table() if table is None else table


def mark_written(tensors: list[torch.Tensor]) -> None:
    """Tell autograd that a kernel has written to tensors."""
    if not _inference_mode():
        _increment_version(tensors)


def _is_subclass(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)


def _fast_table() -> dict[str, Kernel]:
    """Collect the native CPU kernels that the current choice allows, for the next calls."""
    choice = _choice()
    provider = _registry.provider("cpu") if choice in (_AUTOMATIC, "cpu") else None
    return _fast.setdefault(choice, dict(provider.ops) if provider is not None else {})


def run_on_backend(op: str, flat: Sequence[Any]) -> None:
    """Run ``op`` on the forced backend, or else on the first that takes the call."""
    device = _validate.device_of(flat)
    forced = _choice()
    if forced not in (_AUTOMATIC, _registry.REFERENCE):
        reason = _try(forced, op, flat, device, dry_run=False)
        if reason is not None:
            _validate.check(op, flat)  # a wrong argument is the better message
            raise NotImplementedError(f"{op}: the forced backend {forced!r} cannot run this call: {reason}")
        _record(op, forced)
        return
    if forced == _AUTOMATIC:
        declined: dict[str, str] = {}
        for name in _registry.loaded():
            reason = _try(name, op, flat, device, dry_run=False)
            if reason is None:
                _explain_fallback(op, declined, device, name)
                _record(op, name)
                return
            if _insists_on(name, op, device):
                _validate.check(op, flat)
                raise NotImplementedError(f"{op}: GDN_DECODE_KERNEL={name}, but its kernel cannot run this: {reason}")
            declined[name] = reason
        _explain_fallback(op, declined, device, _registry.REFERENCE)
    _validate.check(op, flat)
    reference_kernels[op](*flat)
    _record(op, _registry.REFERENCE)


def _decode_kernel(op: str) -> str | None:
    """Return what GDN_DECODE_KERNEL asks for, of the operations that it is about."""
    return _registry.settings().decode_kernel if op in _FUSED_DECODE else None


def _insists_on(name: str, op: str, device: torch.device) -> bool:
    """Tell whether ``name`` is the only backend that may run a fused decode step on this device."""
    return _decode_kernel(op) == name and device.type != "cpu"


def _explain_fallback(op: str, declined: dict[str, str], device: torch.device, ran_on: str) -> None:
    """Say once why a backend did not run the call, where a user may have expected it to."""
    for name, reason in declined.items():
        info = _registry.info(name)
        if info.available:
            if _wrong_device(name, device) is None:
                log_once(logging.INFO, f"{op} runs on another backend than {name!r}: {reason}")
        elif name == device.type:
            remedy = f" To make it fast: {info.install}" if info.install else ""
            if ran_on == _registry.REFERENCE:
                log_once(logging.WARNING, f"gdn runs on the slow reference: backend {name!r}: {info.reason}.{remedy}")
            else:
                log_once(logging.INFO, f"gdn runs on {ran_on!r}: backend {name!r}: {info.reason}.{remedy}")


def _record(op: str, backend: str) -> None:
    for counter in tuple(_recorders):
        counter[op, backend] += 1


@contextmanager
def record_calls() -> Iterator[Counter[tuple[str, str]]]:
    """Count which backend runs which op, in every thread, while the block runs.

    Yields:
        A Counter that maps ``(op, backend)`` to the number of calls so far.

    Example:
        >>> import gdn_core, torch
        >>> with gdn_core.record_calls() as calls:
        ...     y = gdn_core.rms_norm_gated(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-6)
        >>> [op for op, backend in calls]
        ['rms_norm_gated']
    """
    counter: Counter[tuple[str, str]] = Counter()
    _recorders.append(counter)
    try:
        yield counter
    finally:
        _recorders[:] = [other for other in _recorders if other is not counter]  # equal ones may be there


# --- gradients --------------------------------------------------------------------------------------------------------


def any_tangent(tensors: Sequence[object]) -> bool:
    """Tell whether forward-mode differentiation follows an input."""
    if _is_compiling() or forward_ad._current_level < 0:
        return False
    return any(
        isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )


def wants_gradient(op: str, tensors: Sequence[object], flat: Sequence[Any], *, writes: str | None) -> bool:
    """Tell whether the call must be differentiable and so belongs to the reference.

    Args:
        op: name of the op.
        tensors: every floating-point input.
        flat: the arguments of ``torch.ops.gdn.<op>``, for validation.
        writes: the argument that the call would write to in place, None when it writes only what it returns.

    Raises:
        RuntimeError: a gradient is required of a call that writes to ``writes``.
        NotImplementedError: a gradient is required of a call for which a native backend was forced.
    """
    transformed = not _is_compiling() and _functorch_level() is not None
    needed = _grad_enabled() and (_requires_grad(*tensors) or any_tangent(tensors))
    if not (transformed or needed):
        return False
    if _recorders and _explaining.get():
        raise _Intercepted(op, flat, gradient=True, writes=writes)
    if writes is not None:
        why, remedy = "an input requires a gradient", "call it under torch.no_grad() or torch.inference_mode()"
        if not needed:
            why, remedy = "a torch.func transform is active", "call it outside of the transform"
        raise RuntimeError(f"{op}: {why}, but the call updates {writes!r} in place; {remedy}")
    if _is_compiling():
        return True
    if _choice() not in (_AUTOMATIC, _registry.REFERENCE):
        raise NotImplementedError(
            f"{op}: the forced backend {_choice()!r} has no gradient, and an input requires one; "
            "call it under torch.no_grad() or torch.inference_mode()"
        )
    if not transformed:
        _validate.check(op, flat)
        log_once(
            logging.WARNING,
            f"{op} runs on the slow reference because an input requires a gradient. "
            "For inference, call it under torch.no_grad() or torch.inference_mode()",
        )
    _record(op, _registry.REFERENCE)
    return True


# --- explaining -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """Which backend would run a call (None: it would raise), and why each other one would not."""

    op: str
    backend: str | None
    reasons: dict[str, str | None]

    def __str__(self) -> str:
        chosen = self.backend or "nothing: the call raises"
        lines = [f"{self.op} runs on {chosen}"]
        lines += [f"  {name}: {reason or 'can run it'}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


class _Intercepted(Exception):
    def __init__(self, op: str, flat: Sequence[Any], *, gradient: bool, writes: str | None) -> None:
        super().__init__(op)
        self.op, self.flat, self.gradient, self.writes = op, flat, gradient, writes


_explaining: ContextVar[bool] = ContextVar("gdn_explaining", default=False)


def intercept(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Explanation:
    """Call a public function up to the point where a backend would run it, and say which one would."""
    token = _explaining.set(True)
    try:
        with record_calls():  # keeps calls off the fast path, which does not look at _explaining
            function(*args, **kwargs)
    except _Intercepted as call:
        return _explain(call)
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:  # raised before any backend is asked
        reason = f"{type(error).__name__}: {error}"
        return Explanation(function.__name__, None, {name: reason for name in _registry.names()})
    finally:
        _explaining.reset(token)
    raise AssertionError(f"{function.__name__} did not reach the dispatcher")


def _explain(call: _Intercepted) -> Explanation:
    reasons: dict[str, str | None] = {}
    device = _validate.device_of(call.flat)
    no_gradient = "has no gradient, and an input requires one" if call.gradient else None
    for name in _registry.loaded():
        reasons[name] = no_gradient or _try_dry(name, call.op, call.flat, device)
    in_place = f"an input requires a gradient, but the call updates {call.writes!r} in place" if call.writes else None
    reasons[_registry.REFERENCE] = in_place or _invalid(call.op, call.flat)
    forced = _choice()
    if forced != _AUTOMATIC:
        chosen = forced if reasons[forced] is None else None
        reasons = {
            name: reason or (None if name == forced else f"{forced!r} is forced") for name, reason in reasons.items()
        }
    else:
        asked_for = _decode_kernel(call.op)
        if asked_for is not None and _insists_on(asked_for, call.op, device) and reasons[asked_for] is not None:
            chosen = None
        else:
            chosen = next((name for name, reason in reasons.items() if reason is None), None)
    return Explanation(call.op, chosen, reasons)


def _try_dry(name: str, op: str, flat: Sequence[Any], device: torch.device) -> str | None:
    try:
        return _try(name, op, flat, device, dry_run=True)
    except (TypeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


def _invalid(op: str, flat: Sequence[Any]) -> str | None:
    try:
        _validate.check(op, flat)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
