"""What the tests of several ranks say of a rank that dies, and when they run again."""

import warnings

import crash_checks as checks
import pytest
import ranks


def test_a_crash_where_no_python_runs_is_reported_and_run_again_once(tmp_path):
    with pytest.warns(UserWarning, match=r"ranks \[1\] of in_a_foreign_thread crashed where no Python ran"):
        assert ranks.run(2, checks.in_a_foreign_thread, str(tmp_path), 1) == [1, 1]
    with (
        pytest.warns(UserWarning, match="ran again"),
        pytest.raises(AssertionError, match="rank 1: ended with SIGSEGV"),
    ):
        ranks.run(2, checks.in_a_foreign_thread, str(tmp_path), 9)
    assert len(list(tmp_path.iterdir())) == 1 + ranks.ATTEMPTS


def test_an_abort_of_a_thread_of_c_says_why_and_runs_again(tmp_path, capsys):
    with pytest.warns(UserWarning, match=r"(?s)ranks \[1\].*SIGABRT.*what\(\): a pair was lost"):
        assert ranks.run(2, checks.in_a_foreign_thread, str(tmp_path), 1, "abort", "what(): a pair was lost\n") == [
            1,
            1,
        ]
    assert "a pair was lost" in capsys.readouterr().err


@pytest.mark.parametrize(
    "said", ["op.preamble.length <= op.nbytes. 64 vs 8", "Is there a distributed collective mismatch in your code?"]
)
def test_ranks_that_call_different_collectives_do_not_run_again(tmp_path, said):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AssertionError, match=r"(?s)rank 1: ended with SIGABRT.*" + said.partition(" ")[0]):
            ranks.run(2, checks.in_a_foreign_thread, str(tmp_path), 9, "abort", said)
    assert len(list(tmp_path.iterdir())) == 1


def test_gloo_names_a_mismatch_as_the_runner_expects(tmp_path):
    with pytest.raises(AssertionError, match=r"op\.preamble\.length|collective mismatch"):
        ranks.run(2, checks.mismatched, seconds=60)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (checks.in_python, r"(?s)rank 1: ended with SIGSEGV.*in in_python"),
        (checks.silently, "rank 1: ended with status 3"),
    ],
)
def test_any_other_end_fails_at_once_and_says_where(function, said):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AssertionError, match=said):
            ranks.run(2, function)
