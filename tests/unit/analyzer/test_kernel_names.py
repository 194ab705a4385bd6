"""Short forms of kernels' names."""

from __future__ import annotations

import pytest

from ddltrace.analyzer.formatting.text_table import kernel_text

TEMPLATE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{}, at::detail::Array<char*>>"
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            TEMPLATE.format("FillFunctor<int>"),
            "vectorized_elementwise_kernel<4, FillFunctor<i…",
        ),
        (
            TEMPLATE.format("(anonymous namespace)::sqrt<float>"),
            "vectorized_elementwise_kernel<4, sqrt<float>, …",
        ),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("aten::mm", "aten::mm"),
        ("", ""),
    ],
)
def test_arguments_of_a_template_are_shown_instead_of_namespaces(name: str, text: str) -> None:
    assert kernel_text(name, 47) == text
