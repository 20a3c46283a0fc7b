"""One error family: what it says, what it is, which exit code it carries, and that it survives a process boundary."""

from __future__ import annotations

import pickle

import pytest

from sounding.errors import (
    DataError,
    ExitCode,
    InterruptedRun,
    MissingExtraError,
    NumericalError,
    SoundingError,
    TargetError,
    UsageError,
)

FAMILY = [
    UsageError("expected 2, got 1", hint="--batch-size 32"),
    NumericalError("no convergence after 50 steps", state={"step": 50}),
    TargetError("the model raised"),
    MissingExtraError("pandas", extra="pandas", needed_for="Profile.to_pandas"),
    InterruptedRun("stopped at layer 7", partial=[1, 2]),
    DataError("train.bin is damaged", hint="to fetch it again"),
]


def test_a_sentence_with_one_full_stop_each() -> None:
    assert str(UsageError("expected 2, got 1.", hint="--batch-size 32.")) == "expected 2, got 1. Try --batch-size 32."
    assert str(UsageError("expected 2, got 1")) == "expected 2, got 1."
    assert UsageError("a", hint="").hint is None


@pytest.mark.parametrize(
    ("error", "builtin", "code"),
    [
        (FAMILY[0], ValueError, ExitCode.USAGE),
        (FAMILY[1], ArithmeticError, ExitCode.NUMERICAL),
        (FAMILY[2], RuntimeError, ExitCode.USAGE),
        (FAMILY[3], ImportError, ExitCode.USAGE),
        (FAMILY[4], KeyboardInterrupt, ExitCode.INTERRUPTED),
        (FAMILY[5], RuntimeError, ExitCode.USAGE),
    ],
)
def test_every_error_is_ours_and_the_builtin_a_caller_expects(
    error: SoundingError, builtin: type[BaseException], code: ExitCode
) -> None:
    assert isinstance(error, SoundingError)
    assert isinstance(error, builtin)
    assert error.exit_code == code


def test_exit_codes_are_those_documented() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "HEALTHY": 0,
        "UNHEALTHY": 1,
        "USAGE": 2,
        "NUMERICAL": 3,
        "NOT_KNOWN": 4,
        "INTERRUPTED": 130,
        "TERMINATED": 143,
    }


@pytest.mark.parametrize("error", FAMILY, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling(error: SoundingError) -> None:
    """Workers send errors home by pickle, which by default calls the constructor with the finished sentence."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_the_state_and_the_partial_result_are_kept() -> None:
    assert FAMILY[1].state == {"step": 50}
    assert FAMILY[4].partial == [1, 2]


def test_a_missing_extra_names_the_pip_command() -> None:
    assert str(FAMILY[3]) == (
        "Profile.to_pandas needs the package 'pandas', which is not installed. Try pip install 'sounding[pandas]'."
    )
