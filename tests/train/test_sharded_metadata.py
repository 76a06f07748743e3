"""What metadata of a sharded checkpoint may be made of when it is read."""

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from halfbyte.train import sharded


class By:
    """Is pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def read(content, folder: Path):
    (folder / sharded.METADATA).write_bytes(pickle.dumps(content))
    return sharded._Reader(folder).read_metadata()


def test_members_of_enumerations_may_be_attributes_of_them(tmp_path):
    """So Python 3.11.2 pickles them, which is Debian 12's."""
    members = [By(getattr, _MEM_FORMAT_ENCODING, member.name) for member in _MEM_FORMAT_ENCODING]
    found = read(Metadata({"a": BytesStorageMetadata()}, storage_data={"a": (members, torch.bfloat16)}), tmp_path)
    assert found.storage_data == {"a": (list(_MEM_FORMAT_ENCODING), torch.bfloat16)}


@pytest.mark.parametrize("owner, name", [(Path, "unlink"), (_MEM_FORMAT_ENCODING, "__reduce__"), (Path("x"), "stem")])
def test_other_attributes_are_refused(owner, name, tmp_path):
    with pytest.raises(pickle.UnpicklingError, match=f"getattr of .* and '{name}' is in it"):
        read(By(getattr, owner, name), tmp_path)


def test_other_functions_are_refused(tmp_path):
    with pytest.raises(pickle.UnpicklingError, match=r"builtins.eval is in it, which no checkpoint needs"):
        read(By(eval, "1"), tmp_path)
