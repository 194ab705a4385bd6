"""Records forward passes: outermost modules as phases, every module as a layer.

``nn.Module.__call__`` is wrapped once, on the class: no module gets a hook or an attribute, so
copying, pickling and inspecting models works as before. `torch.compile` is made to treat the
wrapper like the original, so that the compiled graph equals the untraced one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.interpose.autograd import watch_gradients
from ddltrace.tracer.interpose.cuda import is_timed, time_device_of
from ddltrace.tracer.interpose.ddp import note_wrapped
from ddltrace.tracer.interpose.fsdp import note_sharded
from ddltrace.tracer.interpose.import_hooks import after_import
from ddltrace.tracer.record.recorder import PHASE_CODE

if TYPE_CHECKING:
    from torch import nn

    from ddltrace.tracer.interpose.patch_context import PatchContext
    from ddltrace.tracer.interpose.patches import Patches

_FORWARD: Final = PHASE_CODE["forward"]

_now = time.monotonic_ns


def install(context: PatchContext) -> None:
    """Patches ``nn.Module.__call__``.

    Args:
        context: The parts of the recording rank.
    """
    from torch import nn

    original = nn.Module.__call__
    wrapper = _wrapped(context, original)

    def hide(dynamo: Any) -> None:
        try:
            _hide_from_dynamo(original, wrapper, dynamo, context.patches)
        except Exception as error:  # noqa: BLE001 - graphs may break, results stay
            context.fault("hide from torch.compile", error)

    after_import("torch._dynamo", hide)
    context.patches.put(nn.Module, "__call__", wrapper)


def _wrapped(context: PatchContext, original: Callable[..., Any]) -> Callable[..., Any]:
    recorder = context.recorder
    outermost = _Outermost(context)
    call_outermost = _recording_phase(context, outermost, original)
    call_on_device = _recording_device(context, original)
    site_of = context.registry.layer_site.get
    flat, emit, ident = recorder.flat, recorder.emit, threading.get_ident
    only_chooses = _only_chooses(original)

    # The hot path, once per module call. Between two layers nothing of it is in a cache, so it must
    # touch little memory. Where PyTorch's own function only chooses which method runs, the wrapper
    # makes the choice itself: that saves one call, a third of the cost of a layer.
    @functools.wraps(original)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not outermost.records:
            if outermost.running:
                return original(self, *args, **kwargs)
            return call_outermost(self, args, kwargs)
        site = site_of(id(self))
        if site is None:
            site = outermost.register_inner(self)
        if outermost.device_running and not self._modules:
            return call_on_device(self, site, args, kwargs)
        start = _now()
        if only_chooses:
            compiled = self._compiled_call_impl
            chosen: Any = self._call_impl if compiled is None else compiled
            result = chosen(*args, **kwargs)
        else:
            result = original(self, *args, **kwargs)
        end = _now()
        if len(flat) <= recorder.limit:
            emit((site, start, end, ident()))
        else:
            recorder.dropped += 1
        return result

    return __call__


def _only_chooses(call: Callable[..., Any]) -> bool:
    """Whether a ``nn.Module.__call__`` does no more than call one of two other methods.

    PyTorch's calls ``_compiled_call_impl``, or ``_call_impl`` if that is None. The function of
    another version, or a replacement by the job, may use further names.
    """
    code = getattr(call, "__code__", None)
    return code is not None and set(code.co_names) == {"_compiled_call_impl", "_call_impl"}


def _recording_phase(
    context: PatchContext, outermost: _Outermost, original: Callable[..., Any]
) -> Callable[[nn.Module, Any, Any], Any]:
    def call_outermost(module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module and records the call as a phase."""
        pretends = evaluates = False
        start = _now()
        try:
            pretends = outermost.pretends()
            if not pretends:
                evaluates = outermost.begin(module, start)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("begin forward", error)
        if pretends:
            return original(module, *args, **kwargs)
        outermost.running = True
        outermost.records = context.recorder.detailed and not context.recorder.paused
        try:
            return original(module, *args, **kwargs)
        finally:
            outermost.running = outermost.records = outermost.device_running = False
            try:
                outermost.end(module, start, _now(), evaluates)
            except Exception as error:  # noqa: BLE001 - the job continues
                context.fault("end forward", error)

    return call_outermost


def _recording_device(
    context: PatchContext, original: Callable[..., Any]
) -> Callable[[nn.Module, int, Any, Any], Any]:
    recorder = context.recorder
    device_sites: dict[int, int] = {}  # `Recorder.site` builds a key and takes a lock

    def device_site(site: int) -> int:
        found = device_sites.get(site)
        if found is None:
            found = device_sites[site] = recorder.site("kernel", recorder.sites[site][1])
        return found

    def call_on_device(module: nn.Module, site: int, args: Any, kwargs: Any) -> Any:
        """Calls an innermost module and records its host time and its device time."""
        timer = context.device.timer
        begun = None
        try:
            if timer is not None and is_timed(timer, args, kwargs):
                begun = timer.mark()
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("device mark", error)
        start = _now()
        result = original(module, *args, **kwargs)
        end = _now()
        recorder.add(site, start, end, threading.get_ident())
        try:
            if timer is not None and begun is not None:
                timer.interval(device_site(site), begun)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("device interval", error)
        return result

    return call_on_device


def _hide_from_dynamo(
    original: Callable[..., Any], wrapper: Any, dynamo: Any, patches: Patches
) -> None:
    """Makes Dynamo treat the wrapper like the original, and skip the tracer's code.

    Args:
        original: The original ``nn.Module.__call__``.
        wrapper: Its replacement.
        dynamo: The module ``torch._dynamo``.
        patches: Replaces what it knows of the original.
    """
    dynamo.eval_frame.skip_code(wrapper.__code__)
    dynamo.trace_rules.add("ddltrace.tracer")
    # For graphs that include the call, because the module has hooks.
    wrapper._torchdynamo_inline = original
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if getattr(module, "unpatched_nn_module_call", None) is original:
            patches.put(module, "unpatched_nn_module_call", wrapper)


def _note_earlier(context: PatchContext, model: nn.Module) -> None:
    """Registers what was made of a model's modules before the tracer was installed."""
    try:
        for module in model.modules():
            note_wrapped(context, module)
            note_sharded(context, module)
    except ValueError:
        pass  # a RemoteModule in the tree refuses to be asked
    except Exception as error:  # noqa: BLE001 - the job continues
        context.fault("wrapped models", error)


class _Outermost:
    """The calls that the job makes itself, outside of any other module.

    Attributes:
        running: Whether such a call is running, so that calls below it are layers.
        records: Whether such a call is running whose layers are recorded.
        device_running: Whether the device time of its innermost layers is recorded as well.
    """

    def __init__(self, context: PatchContext) -> None:
        import torch

        self._context = context
        self._torch = torch
        self._phase_site = context.recorder.site("phase", "forward")
        self._unnamed_site = context.recorder.site("layer", "(unnamed)")
        self.running = False
        self.records = False
        self.device_running = False

    def pretends(self) -> bool:
        """Whether operators are traced instead of run: by `torch.jit.trace` or with fake tensors.

        Reading a parameter then would become part of the traced graph.
        """
        bindings: Any = self._torch._C
        return (
            bindings._get_tracing_state() is not None
            or bindings._get_dispatch_mode(bindings._TorchDispatchModeKey.FAKE) is not None
        )

    def register_inner(self, module: nn.Module) -> int:
        """Registers a module that was created after its root was registered, or has none."""
        try:
            self._context.registry.add_model(module)
            return self._context.registry.layer_site[id(module)]
        except Exception as error:  # noqa: BLE001 - the job continues
            self._context.fault("register module", error)
            return self._unnamed_site

    def begin(self, module: nn.Module, start: int) -> bool:
        """Starts an outermost call.

        Returns:
            Whether the call evaluates a model that is trained elsewhere.
        """
        context = self._context
        registry = context.registry
        if not registry.is_known(module):
            new = registry.add_model(module)
            _note_earlier(context, module)
            watch_gradients(context, new)
        with contextlib.suppress(ValueError):  # a RemoteModule refuses to name its parameters
            time_device_of(context, module.parameters())
        if context.device.timer is not None and context.recorder.detailed:
            self.device_running = True
        if context.backward.depth:
            return False  # recomputation in backward
        evaluates = False
        if self._torch.is_grad_enabled():
            context.steps.begin_training(start)
        elif not module.training and registry.model_is_trained(module):
            evaluates = True
            context.steps.begin_evaluation(start)
        context.recorder.enter_phase(_FORWARD, start)
        return evaluates

    def end(self, module: nn.Module, start: int, end: int, evaluates: bool) -> None:
        """Ends an outermost call."""
        context = self._context
        recorder = context.recorder
        recomputes = context.backward.depth > 0
        if not recomputes:
            recorder.leave_phase(end)
            if evaluates:
                context.steps.end_evaluation(end)
        if recorder.paused:
            return
        ident = threading.get_ident()
        if recorder.detailed:
            site = context.registry.layer_site.get(id(module))
            if site is not None:
                recorder.add(site, start, end, ident)
        if not recomputes:
            recorder.add(self._phase_site, start, end, ident)
