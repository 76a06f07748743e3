"""The packages themselves: each has the bytes of its profile, every rule of it is needed, and the page says so.

`make test-integrations` installs fouroversix and TransformerEngine's files into folders of their own: the one builds
CUDA extensions unless it is told not to, the other cannot be imported and would be taken for a working one.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.agreement import BLOCK, PAGE
from halfbyte.verify import agreement
from halfbyte.verify.peers import PEERS, quantizer
from halfbyte.verify.profiles import DEFINITION, bytes_by, steps

FOLDER = Path(sys.prefix) / "peers"
INSTALLED = [name for name in PEERS if name != "vllm"]
"""vLLM's wheel is 336 MB."""
TOLERANCE = 2e-4
"""Of a share on the page: torch's normal numbers may end in another bit on another CPU."""


@pytest.fixture
def peer_of(monkeypatch):
    def find(name):
        monkeypatch.syspath_prepend(str(FOLDER / "fouroversix"))
        path = FOLDER / "transformer-engine" if name == "te" else None
        return quantizer(PEERS[name], path)

    return find


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", INSTALLED)
def test_the_package_has_the_bytes_of_its_profile_and_the_page_says_so(name, peer_of):
    quantize, version = peer_of(name)
    assert version.split()[0] == PEERS[name].version
    comparison = agreement.compare_with(PEERS[name], quantize, version)
    assert not [found.unexplained for found in comparison.agreements if found.unexplained]
    (table,) = (body for found, body in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if found == name)
    assert f"**{PEERS[name].distribution} {PEERS[name].version}" in table
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    for found, (data, scales, codes, decoded, _) in zip(comparison.agreements, rows[2:], strict=True):
        assert found.data == data
        assert number(scales) == pytest.approx(found.scales / found.blocks, abs=TOLERANCE)
        assert number(codes) == pytest.approx(found.codes / found.elements, abs=TOLERANCE)
        assert number(decoded) == pytest.approx(found.decoded / found.elements, abs=TOLERANCE)


def number(share: str) -> float:
    return float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", INSTALLED)
def test_every_rule_of_a_profile_is_needed(name, peer_of):
    """With one rule as in the definition the bytes are not the package's any more, on some data."""
    quantize, _ = peer_of(name)
    stored = {data: (x, quantize(x.clone())) for data, x in agreement.data()}
    for rule, _ in steps(PEERS[name].profile):
        without = replace(PEERS[name].profile, **{rule: getattr(DEFINITION, rule)})
        assert any(
            not all(bool((a == b).all()) for a, b in zip(theirs, bytes_by(without, x), strict=True))
            for x, theirs in stored.values()
        ), rule
