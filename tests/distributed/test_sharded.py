"""FSDP2 by block trains to the bits of one process; what needs more than a rank holds is refused by name."""

import pytest
import ranks
import sharded_checks


@pytest.mark.parametrize("how", [sharded_checks.fsdp_by_block, sharded_checks.fsdp_layer_by_layer])
def test_fsdp2_trains_to_the_bits_of_one_process(how):
    assert ranks.run(2, how) == [True, True]


def test_what_is_sharded_otherwise_is_refused_by_name():
    (found,) = ranks.run(1, sharded_checks.refusals)
    said = {
        "one_by_one": (
            "layers.0.attn.q_proj (hb.nn.Linear, 16 -> 16) shares its weight amax with layers.0.attn.k_proj",
            "layers.0.attn.v_proj",
            "fully_shard wrapped the layers one by one",
            "such as their block",
            "share_amax=()",
        ),
        "fused_norm": ("a norm of halfbyte: x is a DTensor", "parallelize_module"),
        "experts": ("hb.nn.GroupedLinear(16 -> 16): its weight is a DTensor, (Shard(dim=0),)", "rules={glob: None}"),
        "plain_function": ("w is a DTensor", "fully_shard"),
        "unquantized_while_whole": ("layers.0: FSDP wrapped it", "call hb.unquantize_ first"),
        "unquantized": ("layers.0.attn.q_proj: its weight is sharded", "before the model is sharded"),
    }
    assert found.keys() == said.keys()
    for case, parts in said.items():
        assert all(part in found[case] for part in parts), (case, found[case])
