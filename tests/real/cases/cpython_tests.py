"""CPython's own tests, one line for what became of each, in order of name.

    cpython_tests.py fork|subprocess [-k PATTERN]...

The lines go to stdout, which nothing that is tested has; all else goes to stderr. `fork` is
test_multiprocessing_fork, made here as CPython makes it: some installations lack that file.
"""

import argparse
import ctypes
import os
import sys
import unittest

PR_SET_CHILD_SUBREAPER = 36


class Outcomes(unittest.TextTestResult):
    """Remembers one word for each test."""

    def __init__(self, *arguments, **how):
        super().__init__(*arguments, **how)
        self.words = {}

    def note(self, test, word):
        # A test that failed in a part of it, and then went on, has failed.
        name = test.id().removeprefix("__main__.")
        if self.words.get(name) != "failed":
            self.words[name] = word

    def addSuccess(self, test):
        super().addSuccess(test)
        self.note(test, "passed")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.note(test, "failed")

    def addError(self, test, err):
        super().addError(test, err)
        self.note(test, "failed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.note(test, "skipped")

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self.note(test, "failed as expected")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.note(test, "failed")

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.note(test, "failed")


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("which", choices=["fork", "subprocess"])
    parser.add_argument("-k", action="append", default=[], metavar="PATTERN")
    return parser.parse_args()


def wait_for_all():
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass


def main():
    options = arguments()
    lines = os.dup(1)
    os.dup2(2, 1)
    loader = unittest.TestLoader()
    if options.k:
        loader.testNamePatterns = [f"*{pattern}*" for pattern in options.k]
    if options.which == "fork":
        tests = loader.loadTestsFromModule(sys.modules["__main__"])
    else:
        tests = loader.loadTestsFromName("test.test_subprocess")
    runner = unittest.TextTestRunner(stream=sys.stderr, verbosity=2, resultclass=Outcomes)
    # Tests leave processes that end by themselves: not after us.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    words = runner.run(tests).words
    wait_for_all()
    text = "".join(f"{word}: {name}\n" for name, word in sorted(words.items()))
    with open(lines, "w", encoding="ascii") as out:
        out.write(text)


if "fork" in sys.argv[1:2]:
    from test._test_multiprocessing import install_tests_in_module_dict

    install_tests_in_module_dict(globals(), "fork")

if __name__ == "__main__":
    main()
