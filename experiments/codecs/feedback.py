"""Modifiers of codecs: error feedback and DoubleSqueeze.

The encoding error of a codec is added to the next gradient: Seide et al., Interspeech 2014;
Karimireddy et al., arXiv 1901.09847, for any codec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ddltrace.experiments.codecs.chunks import rows_at_once
from ddltrace.experiments.codecs.codec import (
    Codec,
    CodecDescription,
    ExchangeForm,
    Payload,
    RowCodec,
    check_elements,
    check_encodable,
    is_finite,
    sum_type,
)
from ddltrace.experiments.codecs.one_bit import OneBit
from ddltrace.experiments.codecs.power_sgd import PowerSgd
from ddltrace.experiments.codecs.random_k import RandomK
from ddltrace.experiments.codecs.thc import Thc
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique


class Modifier(ABC):
    """A technique that changes the codec beside it."""

    @abstractmethod
    def around(self, codec: CodecDescription | None) -> CodecDescription:
        """The changed codec.

        Args:
            codec: The codec that the spec names, if it names one.

        Raises:
            ValueError: The two cannot be combined.
        """


@technique(
    "volume",
    "feedback",
    "adds what a codec did not send to the next gradient",
    "1-Bit SGD, Interspeech 2014; arXiv 1901.09847",
    modifier="required",
)
@dataclass(frozen=True)
class Feedback(Modifier):
    """Encodes gradient plus residual; the encoding error becomes the new residual.

    Attributes:
        decay: Factor of the residual before the gradient is added; SparseLoCo's beta.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError("decay must be between 0 and 1")

    def around(self, codec: CodecDescription | None) -> CodecDescription:
        """The codec with residuals."""
        if codec is None:
            raise ValueError("feedback needs a codec, such as topk+feedback")
        if codec.keeps_residual:
            raise ValueError("the codec keeps its own residual: leave out feedback")
        return WithFeedback(codec, decay=self.decay)


@dataclass(frozen=True)
class WithFeedback(CodecDescription):
    """A codec with residuals.

    Attributes:
        inner: The codec that encodes.
        decay: Factor of the residual before the gradient is added.
        both_sides: Whether averages are always encoded again, as DoubleSqueeze does.
    """

    inner: CodecDescription
    decay: float = 1.0
    both_sides: bool = False

    @property
    def alignment(self) -> int:
        """The inner codec's."""
        return self.inner.alignment

    @property
    def keeps_residual(self) -> bool:
        """Always."""
        return True

    @property
    def second_pass(self) -> CodecDescription:
        """The codec of averages, with residuals of its own."""
        return WithFeedback(self.inner.second_pass, decay=self.decay)

    def codec(self, seed: int | None) -> Codec:
        """The inner codec with residuals."""
        return FeedbackCodec(self, self.inner.codec(seed))

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """The size of the inner codec, since residuals are not sent."""
        return self.inner.wire_bytes(elements, element_bytes)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """The inner codec's, or two passes."""
        return "all_to_all" if self.both_sides else self.inner.exchange(elements, world_size)


@dataclass(frozen=True)
class _Together:
    """Residuals that are the rows of one matrix, so that they are computed together.

    Attributes:
        matrix: All of them.
        keys: The key of each row.
        rows: Views of the rows, which `FeedbackCodec.residuals` has as long as they are in use.
    """

    matrix: torch.Tensor
    keys: tuple[Hashable, ...]
    rows: tuple[torch.Tensor, ...]


class FeedbackCodec(Codec):
    """Encodes tensor plus residual; the encoding error becomes the new residual.

    Residuals are float32 for 16-bit tensors, else of the tensor's own type. A tensor with an
    infinite or NaN element leaves its residual as it was.

    Attributes:
        inner: The codec that encodes.
        residuals: Residuals, flat, by the key of the tensor.
    """

    def __init__(self, description: WithFeedback, inner: Codec) -> None:
        """Wraps a codec.

        Args:
            description: The decay of residuals, and the description of `inner`.
            inner: The codec; its form for use below a residual is taken.
        """
        super().__init__(description)
        self.inner = inner.with_feedback()
        self._decay = description.decay
        self.residuals: dict[Hashable, torch.Tensor] = {}
        self._together: dict[Hashable, _Together] = {}
        self._shape: tuple[int, ...] = ()

    @property
    def residual(self) -> torch.Tensor | None:
        """The residual of the tensor that has no key, in its shape; None before the first."""
        residual = self.residuals.get(None)
        return None if residual is None else residual.view(self._shape)

    def payload_bytes(
        self, shape: Sequence[int], dtype: torch.dtype, *, key: Hashable = None
    ) -> int:
        """The inner codec's."""
        return self.inner.payload_bytes(shape, dtype, key=key)

    def compensated(self, flat: torch.Tensor, key: Hashable) -> torch.Tensor:
        """Returns a tensor plus its residual, which is to be encoded.

        Args:
            flat: Its elements.
            key: Key of the tensor's state.

        Returns:
            A flat tensor, float32 for 16-bit tensors, which `keep` needs again. It is the
            residual's own memory, unless the tensor is not finite.
        """
        wide = flat.float() if flat.dtype.itemsize < 4 else flat
        residual = self.residuals.get(key)
        if residual is not None:
            check_elements(residual.numel(), flat, key)
        if not is_finite(flat):
            return wide.clone() if residual is None else wide + residual
        if residual is None:
            residual = self.residuals[key] = wide.clone()
            return residual
        if self._decay != 1.0:
            residual.mul_(self._decay)
        return residual.add_(wide)

    def keep(self, compensated: torch.Tensor, sent: torch.Tensor, key: Hashable) -> None:
        """Stores the new residual.

        Args:
            compensated: From `compensated`; becomes the residual if it was finite.
            sent: The decoded payload, flat. An element that overflowed in the payload has no
                residual.
            key: Key of the tensor's state.
        """
        if self._is_residual(compensated, key):
            _without_overflow(compensated.sub_(sent))

    def _is_residual(self, compensated: torch.Tensor, key: Hashable) -> bool:
        residual = self.residuals.get(key)
        return residual is not None and residual.data_ptr() == compensated.data_ptr()

    def encode_rows(self, rows: torch.Tensor, keys: Sequence[Hashable]) -> list[torch.Tensor]:
        """Computes residuals for as many rows together as the inner codec encodes together."""
        if not isinstance(self.inner, RowCodec):
            return super().encode_rows(rows, keys)
        check_encodable(rows)
        found: list[torch.Tensor] = []
        at_once = rows_at_once(rows.shape[1], rows.device)
        with torch.no_grad():
            for start in range(0, len(keys), at_once):
                group = rows[start : start + at_once].detach()
                own = tuple(keys[start : start + at_once])
                if len(own) == 1 or not is_finite(group):
                    found += super().encode_rows(group, own)  # finds the rows that are not finite
                else:
                    found += self._encode_matrix(self.inner, group, own).unbind()
        return found

    def _encode_matrix(
        self, inner: RowCodec, rows: torch.Tensor, keys: tuple[Hashable, ...]
    ) -> torch.Tensor:
        residuals = self._matrix_of(keys, rows)
        if self._decay != 1.0:
            residuals.mul_(self._decay)
        residuals.add_(rows)
        data = inner.encode_matrix(residuals.to(rows.dtype))
        residuals.sub_(inner.decode_rows(data, rows.shape[1], rows.dtype))
        _without_overflow(residuals)
        return data

    def _matrix_of(self, keys: tuple[Hashable, ...], like: torch.Tensor) -> torch.Tensor:
        """The residuals of some keys as one matrix, which is made where there is none yet."""
        found = self._together.get(keys[0])
        former = [self.residuals.get(key) for key in keys]
        if (
            found is not None
            and found.keys == keys
            and all(one is row for one, row in zip(former, found.rows, strict=True))
        ):
            return found.matrix
        matrix = torch.zeros(like.shape, dtype=sum_type(like.dtype), device=like.device)
        rows = matrix.unbind()
        for key, residual, row in zip(keys, former, rows, strict=True):
            if residual is not None:
                check_elements(residual.numel(), row, key)
                row.copy_(residual)
            self.residuals[key] = row
        self._together.update(dict.fromkeys(keys, _Together(matrix, keys, rows)))
        return matrix

    def decode_rows(self, data: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Decodes as the inner codec does."""
        return self.inner.decode_rows(data, elements, dtype)

    def sum_rows(self, data: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Adds up as the inner codec does."""
        return self.inner.sum_rows(data, elements, dtype)

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        wanted = self.compensated(flat, key)
        payload = self.inner.encode(wanted.to(flat.dtype).view(shape), key=key)
        if self._is_residual(wanted, key):
            self.inner.add_to(wanted, payload, factor=-1.0)
            _without_overflow(wanted)
        if key is None:
            self._shape = shape
        return payload

    def _decode(self, payload: Payload) -> torch.Tensor:
        return self.inner.decode(payload).view(-1)

    def add_to(self, total: torch.Tensor, payload: Payload, factor: float = 1.0) -> None:
        """Adds as the inner codec does."""
        self.inner.add_to(total, payload, factor)


def _without_overflow(residual: torch.Tensor) -> None:
    """Clears elements that overflowed in the payload."""
    if not is_finite(residual):
        residual.nan_to_num_(0.0, posinf=0.0, neginf=0.0)


@technique(
    "volume",
    "doublesqueeze",
    "two passes of a codec (onebit where none is named), each with its residual",
    "DoubleSqueeze, arXiv 1905.05957",
    modifier="optional",
)
@dataclass(frozen=True)
class DoubleSqueeze(Modifier):
    """Two passes with a codec, ranks to servers and back, each with its own residual.

    Every rank is the server of one shard of each tensor. Without another codec the passes use
    1-bit SGD's.
    """

    def around(self, codec: CodecDescription | None) -> CodecDescription:
        """The codec with residuals on both sides."""
        codec = OneBit() if codec is None else codec
        if codec.keeps_residual:
            raise ValueError("doublesqueeze cannot change a codec that keeps its own residual")
        if isinstance(codec, PowerSgd | RandomK | Thc):
            raise ValueError("doublesqueeze cannot change a codec whose payloads are summed")
        return WithFeedback(codec, both_sides=True)


def compose(codec: CodecDescription | None, modifier: Modifier | None) -> CodecDescription | None:
    """A codec with its modifier.

    Args:
        codec: The strategy's codec.
        modifier: The strategy's modifier.

    Returns:
        The description of both together; None if neither is given.

    Raises:
        ValueError: The two cannot be combined.
    """
    return codec if modifier is None else modifier.around(codec)
