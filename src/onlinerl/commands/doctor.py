"""`onlinerl doctor`: checks a configuration, and whether the parts that it names answer."""

import sys

from onlinerl.commands.checks import Finding, service_checks, stack_ports, static_findings
from onlinerl.settings import Settings

_MAY_BE_EXTERNAL = ("broker", "registry")
"""Parts that are asked although the stack does not start them."""

_MARKS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def run_doctor(settings: Settings) -> int:
    """Print one line per check; returns 1 when anything is wrong, else 0.

    A part that does not answer is a note, because `doctor` also runs before `up`.
    """
    findings = [*static_findings(settings), *_service_findings(settings)]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        sys.stdout.write(
            f"{_MARKS[finding.status]} {finding.subject:<{width}}  {finding.message}\n"
        )
    return 1 if any(finding.status == "wrong" for finding in findings) else 0


def _service_findings(settings: Settings) -> list[Finding]:
    findings = []
    ports = stack_ports(settings)
    for name, find_problem in service_checks(settings).items():
        if name not in ports and name not in _MAY_BE_EXTERNAL:
            findings.append(Finding(name, "note", "not checked: it has no port of its own"))
            continue
        problem = find_problem()
        address = "{}:{}".format(*ports[name]) if name in ports else "external"
        if problem is None:
            findings.append(Finding(name, "ok", f"answers ({address})"))
        else:
            findings.append(Finding(name, "note", f"does not answer: {problem}"))
    return findings
