"""`python -m tests.differential --reference URL --subject URL`: compare the answers of two servers on one model."""

import argparse
import re
import sys

from .accepted import accepted
from .cases import CASES, Case
from .compare import differences
from .http import Answer, Peer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument(
        "--reference", required=True, metavar="URL", help="the server to compare with"
    )
    parser.add_argument("--subject", required=True, metavar="URL", help="the server under test")
    parser.add_argument(
        "--kind", choices=("generate", "pooling"), default="generate", help="of both models"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose names hold this")
    parser.add_argument("--show", action="store_true", help="print both answers of each difference")
    options = parser.parse_args()
    reference, subject = Peer(options.reference), Peer(options.subject)
    cases = [
        case for case in CASES if case.kind == options.kind and re.search(options.only, case.name)
    ]
    num_accepted = num_unexplained = 0
    for case in cases:
        answers = ask(reference, case), ask(subject, case)
        for difference in differences(*answers, case.offenders):
            if accepted(case.name, difference):
                num_accepted += 1
                continue
            num_unexplained += 1
            print(f"{case.name}: {difference}", flush=True)
            if options.show:
                print(*(f"    {answer}" for answer in answers), sep="\n")
    print(
        f"{len(cases)} requests: {num_accepted} accepted differences, {num_unexplained} unexplained"
    )
    return int(num_unexplained > 0)


def ask(peer: Peer, case: Case) -> Answer:
    body = case.body
    if isinstance(body, dict):
        body = {"model": peer.model, **body}
    return peer.send(case.method, case.path, body, case.headers)


if __name__ == "__main__":
    sys.exit(main())
