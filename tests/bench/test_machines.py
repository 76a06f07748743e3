"""The table of machines is made of reports that passed, with the fingerprint of the reference."""

import json

from bench import machines
from halfbyte.verify.fingerprint import EXPECTED
from halfbyte.verify.record import ROW_HEAD


def test_every_report_is_a_row_of_the_table():
    paths = sorted(machines.FOLDER.glob("*.json"))
    table = machines.render([]).splitlines()
    assert len(table) == 2 + len(paths) >= 4
    for path in paths:
        report = json.loads(path.read_text())
        assert report["row"] in table and report["row"].count("|") == ROW_HEAD.splitlines()[0].count("|")
        assert report["fingerprint"] == EXPECTED and f"`{EXPECTED}`" in report["row"]
        assert report["passed"] == ("**fails**" not in report["row"])
    assert "CPU" in table[-1]
