"""`onlinerl doctor`: is this configuration right, and do the parts that it names answer?"""

import sys
from typing import TYPE_CHECKING

from onlinerl.commands.checks import Finding, ports_of, service_checks, static_findings

if TYPE_CHECKING:
    from onlinerl.settings import Settings

_MAY_BE_ELSEWHERE = ("broker", "registry")
MARKS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def run_doctor(settings: "Settings") -> int:
    """Print one line for each thing looked at; 1 when anything is wrong.

    A part that is not running is a note, not an error: `doctor` is also for before `up`.
    """
    findings = [*static_findings(settings), *_services(settings)]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        sys.stdout.write(f"{MARKS[finding.status]} {finding.subject:<{width}}  {finding.message}\n")
    return 1 if any(finding.status == "wrong" for finding in findings) else 0


def _services(settings: "Settings") -> list[Finding]:
    findings = []
    ports = ports_of(settings)
    for name, problem_of in service_checks(settings).items():
        if name not in ports and name not in _MAY_BE_ELSEWHERE:
            findings.append(Finding(name, "note", "not looked at: it has no port of its own"))
            continue
        problem = problem_of()
        where = "{}:{}".format(*ports[name]) if name in ports else "external"
        if problem is None:
            findings.append(Finding(name, "ok", f"answers ({where})"))
        else:
            findings.append(Finding(name, "note", f"does not answer: {problem}"))
    return findings
