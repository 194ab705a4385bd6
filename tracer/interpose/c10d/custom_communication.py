"""Records communication that bypasses ``torch.distributed``: symmetric memory and other libraries.

Such a library writes into the memory of other ranks by kernels of its own. Its functions are
listed in `LIBRARIES` and patched when it is imported. A call becomes a message. On a device it
lasts, in the current stream, until what the call launched has ended.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.interpose.c10d.arguments import first_tensor
from ddltrace.tracer.interpose.c10d.c10d_operators import Operator
from ddltrace.tracer.interpose.c10d.groups import Group
from ddltrace.tracer.interpose.c10d.python_kernels import PythonKernels
from ddltrace.tracer.interpose.import_hooks import after_import

if TYPE_CHECKING:
    from types import ModuleType

    from ddltrace.tracer.interpose.c10d.observer import Observer
    from ddltrace.tracer.interpose.patch_context import PatchContext

_now = time.monotonic_ns


class Call(NamedTuple):
    """A function that communicates.

    Attributes:
        name: The function in its module, such as ``Buffer.dispatch``; or an operator of PyTorch's
            dispatcher, such as ``symm_mem::one_shot_all_reduce``.
        op: Operation of the message.
        inputs: Argument with this rank's input; None if it is not an argument.
        outputs: Argument with this rank's output; None if it is not an argument.
        group: Argument with the name of the process group, or ``self.`` and an attribute with the
            group; None if the call does not tell it.
        when: An argument and the end of its text, with which the call communicates.
        unseen: Arguments with which the call returns, and its stream continues, before the message
            has ended.
    """

    name: str
    op: str
    inputs: str | None
    outputs: str | None = None
    group: str | None = None
    when: tuple[str, str] | None = None
    unseen: tuple[str, ...] = ()


class Library(NamedTuple):
    """The communicating functions of a module.

    Attributes:
        name: The library.
        module: The module that defines the functions, or in whose jobs the operators exist.
        source: Where the signatures were read.
        calls: The functions.
    """

    name: str
    module: str
    source: str
    calls: tuple[Call, ...]


def _symmetric(op: str, *names: str, inputs: str = "input", outputs: str | None = None) -> Any:
    """Operators of PyTorch's symmetric memory; an all-reduce has an output of the same size."""
    if op == "all_reduce":
        outputs = inputs
    return (Call(f"symm_mem::{name}", op, inputs, outputs, "group_name") for name in names)


def _deep_ep(name: str) -> Call:
    unseen = ("async_finish", "return_recv_hook")
    return Call(f"Buffer.{name}", "all_to_all", "x", group="self.group", unseen=unseen)


LIBRARIES: Final = (
    Library(
        "PyTorch symmetric memory",
        "torch.distributed._symmetric_memory",
        "pytorch/pytorch: torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.cpp",
        (
            *_symmetric(
                "all_reduce",
                *("multimem_all_reduce_", "multimem_one_shot_all_reduce", "one_shot_all_reduce"),
                *("multimem_one_shot_all_reduce_out", "one_shot_all_reduce_out"),
                *("two_shot_all_reduce_", "two_shot_all_reduce_out"),
            ),
            *_symmetric(
                "all_reduce",
                *("one_shot_all_reduce_copy", "one_shot_all_reduce_copy_out"),
                inputs="local_input",
            ),
            *_symmetric("all_gather", "multimem_all_gather_out", outputs="out"),
            *_symmetric("all_gather", "_low_contention_all_gather", inputs="tensor"),
            *_symmetric(
                "all_gather",
                *("fused_all_gather_matmul", "fused_all_gather_scaled_matmul"),
                inputs="A",
            ),
            *_symmetric("reduce_scatter", "reduce_scatter_out", outputs="output"),
            *_symmetric("reduce_scatter", "_low_contention_reduce_scatter", inputs="tensor"),
            # The reduced product is not an argument.
            Call(
                "symm_mem::fused_matmul_reduce_scatter", "reduce_scatter", None, None, "group_name"
            ),
            Call(
                *("symm_mem::fused_scaled_matmul_reduce_scatter", "reduce_scatter"),
                *(None, None, "group_name"),
            ),
            *_symmetric(
                "all_to_all",
                *("all_to_all_vdev", "all_to_all_vdev_2d", "all_to_all_vdev_2d_offset"),
                "nvshmem_all_to_all",
                outputs="out",
            ),
            *_symmetric("broadcast", "nvshmem_broadcast", outputs="input"),
            *_symmetric("reduce", "multimem_one_shot_reduce_out", outputs="out"),
        ),
    ),
    Library(
        "DeepEP",
        "deep_ep.buffer",
        "deepseek-ai/DeepEP: deep_ep/buffer.py",
        (
            *(_deep_ep("dispatch"), _deep_ep("combine")),
            *(_deep_ep("low_latency_dispatch"), _deep_ep("low_latency_combine")),
        ),
    ),
    Library(
        "vLLM",
        "vllm.distributed.device_communicators.custom_all_reduce",
        "vllm-project/vllm: vllm/distributed/device_communicators/custom_all_reduce.py",
        (Call("CustomAllreduce.all_reduce", "all_reduce", "inp", "inp", "self.group"),),
    ),
    Library(
        "FlashInfer",
        "flashinfer.comm.trtllm_ar",
        "flashinfer-ai/flashinfer: flashinfer/comm/trtllm_ar.py",
        (Call("trtllm_allreduce_fusion", "all_reduce", "allreduce_in", "allreduce_in"),),
    ),
    Library(
        "TensorRT-LLM",
        "tensorrt_llm._torch.distributed.ops",
        "NVIDIA/TensorRT-LLM: cpp/tensorrt_llm/thop/allreduceOp.cpp",
        (Call("trtllm::allreduce", "all_reduce", "input", "input"),),
    ),
    Library(
        "Transformer Engine user buffers",
        "transformer_engine.pytorch.cpp_extensions.gemm",
        "NVIDIA/TransformerEngine: transformer_engine/pytorch/cpp_extensions/gemm.py",
        (
            # With `bulk_overlap`, the message is of another tensor, which is not an argument.
            Call("general_gemm", "all_gather", None, "B", when=("ub_type", "AG")),
            Call("general_gemm", "reduce_scatter", None, "extra_output", when=("ub_type", "RS")),
        ),
    ),
)


def install(context: PatchContext, observer: Observer) -> None:
    """Patches the functions of each library when it is imported.

    Args:
        context: The parts of the recording rank.
        observer: Records the messages.
    """
    for library in LIBRARIES:
        calls = _Calls(context, observer, library)
        after_import(library.module, quiet(calls.patch, context.fault))


class _Inside(threading.local):
    """Whether the thread runs one of the functions: those below it are part of it."""

    now = False


_inside: Final = _Inside()


class _Calls:
    """Patches and records the functions of one library.

    Args:
        context: The parts of the recording rank.
        observer: Records messages.
    """

    def __init__(self, context: PatchContext, observer: Observer, library: Library) -> None:
        self._context = context
        self._observer = observer
        self._library = library
        self._unknown_group = Group(f"{library.name} of rank {context.record.info.rank}", (), None)
        # A message whose group is not known is not part of any collective.
        self._unknown_group.next_elsewhere = lambda: None

    def patch(self, module: ModuleType) -> None:
        """Patches the functions that this version of the library has."""
        for call in self._library.calls:
            if "::" in call.name:
                self._patch_operator(call)
                continue
            owner: Any = module
            *path, name = call.name.split(".")
            for part in path:
                owner = getattr(owner, part, None)
            original = getattr(owner, name, None)
            if original is not None:
                self._context.patches.put(owner, name, self._around(call, original))

    def _patch_operator(self, call: Call) -> None:
        import torch
        from torch._C import DispatchKey, _dispatch_keyset_full_after

        namespace, name = call.name.split("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:
            return
        operator = packet.default
        names = [argument.name for argument in operator._schema.arguments]
        below, meta = _dispatch_keyset_full_after(DispatchKey.BackendSelect), DispatchKey.Meta
        redispatch, record = operator.redispatch, self._recorder(call, names)

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if keyset.has(meta):  # nothing is sent of tensors without elements
                return redispatch(keyset & below, *args, **kwargs)
            with record(args, kwargs):
                return redispatch(keyset & below, *args, **kwargs)

        PythonKernels(self._context, namespace).add(name, kernel)

    def _around(self, call: Call, original: Callable[..., Any]) -> Callable[..., Any]:
        record = self._recorder(call, list(inspect.signature(original).parameters))

        @functools.wraps(original)
        def communicating(*args: Any, **kwargs: Any) -> Any:
            with record(args, kwargs):
                return original(*args, **kwargs)

        return communicating

    def _recorder(self, call: Call, names: Sequence[str]) -> Callable[..., Any]:
        """A context manager that records what happens in it as a message.

        Args:
            call: What runs in it.
            names: Names of its arguments, in order.
        """
        place = {name: number for number, name in enumerate(names)}
        below = self._context.groups.below

        @contextmanager
        def record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
            def argument(name: str | None) -> Any:
                if name is None or name not in place:
                    return None
                number = place[name]
                return args[number] if number < len(args) else kwargs.get(name)

            start, begun = _now(), None
            if not _inside.now:
                try:
                    begun = self._begin(call, argument)
                except Exception as error:  # noqa: BLE001 - the job continues
                    self._context.fault(call.name, error)
            if begun is None:
                yield
                return
            group, mark = begun
            former = below.outer, below.messages
            _inside.now, below.outer, below.messages = True, group, 0
            is_sent = False
            try:
                yield
                # A library may fall back to messages of torch.distributed, which are recorded.
                is_sent = not below.messages
            finally:
                below.outer, below.messages = former
                _inside.now = False
                try:
                    if is_sent:
                        self._record(call, argument, group, start, mark)
                    else:
                        self._observer.forget_mark(mark)
                except Exception as error:  # noqa: BLE001 - the job continues
                    self._context.fault(call.name, error)

        return record

    def _begin(
        self, call: Call, argument: Callable[[str | None], Any]
    ) -> tuple[Group, int | None] | None:
        """Group and mark of a message; None if the call sends nothing that is recorded."""
        observer = self._observer
        if not observer.active:
            return None
        if call.when is not None and not str(argument(call.when[0])).endswith(call.when[1]):
            return None
        group = self._group(call, argument)
        if self._context.recorder.paused:
            group.next_collective()
            return None
        first = _tensor(call, argument)
        return group, None if first is None else observer.mark_before(first)

    def _group(self, call: Call, argument: Callable[[str | None], Any]) -> Group:
        from torch._C._distributed_c10d import _resolve_process_group

        if call.group is None:
            return self._unknown_group
        if call.group.startswith("self."):
            process_group = getattr(argument("self"), call.group.removeprefix("self."))
        else:
            process_group = _resolve_process_group(argument(call.group))
        return self._context.groups.of(process_group)

    def _record(
        self,
        call: Call,
        argument: Callable[[str | None], Any],
        group: Group,
        start: int,
        mark: int | None,
    ) -> None:
        inputs, outputs = argument(call.inputs), argument(call.outputs)
        if argument("bulk_overlap"):
            inputs = outputs = None
        same = call.inputs == call.outputs
        operator = Operator(
            call.op,
            None if inputs is None else 0,
            None if outputs is None else (0 if same else 1),
            2,
        )
        values, tensor = (inputs, outputs, group), _tensor(call, argument)
        if tensor is not None and self._observer.is_captured(tensor):
            self._observer.descriptions.capture(operator, values, group, start)
            return
        message = self._observer.descriptions.describe(
            operator, values, group, start, seam="library"
        )
        if inputs is None and outputs is None:
            message.bytes = message.out_bytes = None
        if message.name == message.op:
            message.name = call.name.replace("::", ".")
        is_unseen = any(argument(name) for name in call.unseen)
        self._observer.end_custom(message, tensor, mark, is_unseen=is_unseen)


def _tensor(call: Call, argument: Callable[[str | None], Any]) -> Any:
    """A tensor that tells the device of a call; None if there is none."""
    return first_tensor([argument(call.inputs), argument(call.outputs), argument("A")])
