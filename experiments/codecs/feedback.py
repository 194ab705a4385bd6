"""Error feedback: the encoding error of a codec is added to the next gradient.

Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847, for any codec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ddltrace.experiments.codecs.description import CodecDescription, ExchangeForm
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

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """The size of the inner codec, since residuals are not sent."""
        return self.inner.wire_bytes(elements, element_bytes)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """The inner codec's, or two passes."""
        return "all_to_all" if self.both_sides else self.inner.exchange(elements, world_size)
