"""What a kernel does before it waits is found on all paths."""

from __future__ import annotations

import pytest

from tests.kernels.dependent_launches import broken_rules

PTX = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 out
)
{{
	.reg .pred 	%p<2>;
	griddepcontrol.launch_dependents;
	ld.global.b32 	%r1, [ %rd1 + 0 ];
	setp.eq.b32 	%p1, %r1, 0;
	@%p1 bra 	$L__BB0_2;
// %bb.1:
	{first}
	bra.uni 	$L__BB0_3;
$L__BB0_2:
	{second}
$L__BB0_3:
	st.global.b32 [ %rd2 + 0 ], {{ %r1 }};
	ret;
}}
"""
WAIT = "griddepcontrol.wait; // dummy %r2"


@pytest.mark.parametrize(
    ("first", "second", "broken"),
    [
        (WAIT, WAIT, []),
        (WAIT, "", ["st.global.b32 [ %rd2 + 0 ], { %r1 };", "ret;"]),
        (f"@%p1 ret;\n\t{WAIT}", WAIT, ["ret;"]),
        (f"@%p1 st.global.b32 [ %rd2 + 0 ], {{ %r1 }};\n\t{WAIT}", WAIT, ["st.global.b32 [ %rd2 + 0 ], { %r1 };"]),
        (f"st.shared.b32 [ %r3 ], %r1;\n\t{WAIT}", WAIT, []),
        (WAIT, f"atom.global.gpu.acq_rel.add.u32 %r4, [ %rd2 + 0 ], 1;\n\t{WAIT}", ["atom.global"]),
    ],
)
def test_ends_and_writes_before_the_wait_are_found(first: str, second: str, broken: list[str]) -> None:
    found = broken_rules(PTX.format(first=first, second=second))
    assert len(found) == len(broken) and all(map(str.startswith, found, broken))
