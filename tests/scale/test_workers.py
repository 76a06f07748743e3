"""What one set of processes found is asked for in one worker."""

import test_fsdp
import test_fsdp_matrix
import workers


def test_a_set_of_processes_belongs_to_one_worker():
    family = test_fsdp.test_4_bit_gather_is_bf16_gather_and_local_quantization.__name__
    cases = {
        world: {f"tests/scale/test_fsdp.py::{family}[{world}-{n}]" for n in test_fsdp.CASES[world]}
        for world in (1, 2, 3, 4)
    }
    units = [{workers.unit(nodeid) for nodeid in of_world} for of_world in cases.values()]
    assert all(len(one) == 1 for one in units) and len(set.union(*units)) == len(test_fsdp.CASES)
    path = f"tests/scale/{test_fsdp_matrix.__name__}.py"
    assert workers.unit(f"{path}::test_row[a-b]") == workers.unit(f"{path}::test_the_page_has_the_table")
    free = "tests/scale/test_fsdp.py::test_200_steps[{}]"
    assert workers.unit(free.format(2)) != workers.unit(free.format(4))
