//! Decoders of files: checkpoints, the state of a sampler, traces, what a failed rank has written.

use std::fs;

use drumline_group::trace;
use drumline_train::{checkpoint::Checkpoint, error_file::ErrorFile, sampler::SamplerState};

use super::scratch::Scratch;
use crate::Verdict;

/// A checkpoint. It must encode to the same bytes.
pub(super) fn checkpoint(bytes: &[u8]) -> Verdict {
    let Ok(checkpoint) = Checkpoint::from_bytes(bytes) else { return Verdict::Refused };
    assert_eq!(checkpoint.to_bytes().as_deref(), Ok(bytes));
    Verdict::Taken
}

/// The text of a sampler's state. It must be written as the same text.
pub(super) fn sampler(bytes: &[u8]) -> Verdict {
    let Ok(text) = str::from_utf8(bytes) else { return Verdict::Refused };
    let Ok(state) = text.parse::<SamplerState>() else { return Verdict::Refused };
    assert_eq!(state.to_string(), text);
    Verdict::Taken
}

/// The trace files of a run, with a zero byte between two ranks. The files are merged and summarized, because
/// there is no encoder to compare with.
pub(super) fn trace(bytes: &[u8]) -> Verdict {
    let Ok(scratch) = Scratch::new() else { return Verdict::Refused };
    let directory = scratch.path();
    for (rank, file) in bytes.split(|byte| *byte == 0).take(4).enumerate() {
        if fs::write(directory.join(format!("rank-{rank}.json")), file).is_err() {
            return Verdict::Refused;
        }
    }
    let merged = trace::merge(directory, &directory.join("trace.json"));
    let summary = trace::summarize(directory);
    assert_eq!(merged.is_ok(), summary.is_ok(), "{merged:?}, {summary:?}");
    if let Ok(summary) = &summary {
        let _ = summary.to_string();
    }
    summary.into()
}

/// The error file of a rank. What it says must be written as a file that says the same.
pub(super) fn error_file(bytes: &[u8]) -> Verdict {
    let read = ErrorFile::parse(bytes);
    let ErrorFile::Failure(failure) = &read else { return Verdict::Refused };
    assert_eq!(ErrorFile::parse(failure.to_json().as_bytes()), read);
    Verdict::Taken
}
