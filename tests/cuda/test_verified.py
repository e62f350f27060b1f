"""Every program is checked before its kernel is compiled: one that is broken on purpose is refused, in each builder."""

from collections import Counter
from collections.abc import Callable

import pytest

from korch.candidate.candidate import Refusal
from korch.cuda.kernel import CudaKernel
from korch.cuda.target import CudaTarget
from korch.provider.faults import Fault, Faults
from korch.provider.triton import TritonAttentionProvider, TritonProductProvider, TritonProvider, TritonWinogradProvider
from korch.tile.check import check as checks
from korch.tile.check.check import check_program
from korch.tile.ir.program import TileProgram
from tests.cuda.cuda_groups import ATTENTIONS, PRODUCTS, WINOGRADS
from tests.provider.test_verified import racing, shorter
from tests.tile.tile_groups import FAMILIES

Alter = Callable[[TileProgram], TileProgram]

BUILDERS = {
    "fused": (TritonProvider(), lambda: list(FAMILIES["normalizations"]())[:2]),
    "products": (TritonProductProvider(), lambda: [PRODUCTS["batches"](), PRODUCTS["many terms"]()]),
    "attention": (TritonAttentionProvider(), lambda: [ATTENTIONS["masked"]()]),
    "winograd": (TritonWinogradProvider(), lambda: [WINOGRADS["4 odd"]()]),
}


@pytest.mark.fault
@pytest.mark.parametrize("builder", BUILDERS)
def test_a_program_that_is_broken_on_purpose_is_refused(
    builder: str, small: CudaTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, groups = BUILDERS[builder]
    broken, refused = Counter[str](), Counter[str]()
    for group in groups():
        offers = provider.offer(group, small)
        assert not isinstance(offers, Refusal), offers
        for offer in offers[:2]:
            monkeypatch.setattr(checks, "check_program", check_program)
            assert isinstance(Faults().kernel(provider, group, offer, small), CudaKernel)
            for alter in (shorter, racing):

                def check(program: TileProgram, alter: Alter = alter) -> tuple[str, ...]:
                    broken[alter.__name__] += alter(program) != program
                    return check_program(alter(program))

                monkeypatch.setattr(checks, "check_program", check)
                found = Faults().kernel(provider, group, offer, small)
                refused[alter.__name__] += isinstance(found, Fault) and "InvalidGraphError" in found.reason
    assert refused == broken and broken["shorter"] and broken["racing"]
