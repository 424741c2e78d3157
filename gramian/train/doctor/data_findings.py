"""The data of a config, read once: what a look at it finds, and its windows."""

from gramian.core.errors import GramianError
from gramian.data import Windows, load_tokenizer, read_documents
from gramian.data.data_sanity import Finding, look_at_documents, look_at_files, look_at_windows
from gramian.data.load_windows import cut
from gramian.train.config.config import DataSection
from gramian.train.doctor.check import Check


def look_at_data(data: DataSection) -> tuple[list[Check], Windows | None]:
    """Findings, and the windows to train on; None: the files are cut off so that they cannot be read.

    Raises:
        GramianError: if data is missing or cannot be read for another reason than that it is cut off.
    """
    findings = look_at_files(data)
    try:
        documents = read_documents(data, load_tokenizer(data.tokenizer))
    except GramianError:
        if all(finding.ok for finding in findings):
            raise
        return [_check(finding) for finding in findings], None
    findings += look_at_documents(documents)
    training, _ = cut(documents, data)
    findings += look_at_windows(training, data.batch)
    return [_check(finding) for finding in findings], training


def _check(finding: Finding) -> Check:
    measured, threshold = (_number(finding.name, number) for number in (finding.measured, finding.threshold))
    hint = "" if finding.ok else finding.hint
    return Check(f"data: {finding.name}", measured, threshold, finding.ok, hint, finding.measured)


def _number(name: str, number: float) -> str:
    return f"{number:.1%}" if "documents" in name else f"{number:,.0f}"
