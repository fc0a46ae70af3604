//! Settings that must be equal on all ranks.

use drumline::ProcessGroup;

use crate::{Error, Result};

/// What a rank begins an epoch with.
#[derive(Default)]
pub(super) struct Settings {
    values: Vec<(String, String)>,
    problem: Option<String>,
}

impl Settings {
    pub(super) fn add(&mut self, name: &str, value: impl ToString) {
        self.values.push((name.to_owned(), value.to_string()));
    }

    /// Why this rank cannot begin. The first problem counts.
    pub(super) fn refuse(&mut self, problem: impl Into<String>) {
        self.problem.get_or_insert(problem.into());
    }

    /// Compares the settings of all ranks. Returns the same error on all of them if a rank cannot begin, or if
    /// settings differ.
    pub(super) fn agree(self, group: &ProcessGroup) -> Result<()> {
        let all = group.all_gather_object(&(self.values, self.problem))?;
        let refused = all.iter().enumerate().find_map(|(rank, (_, problem))| {
            problem.as_ref().map(|problem| format!("rank {rank}: {problem}"))
        });
        let differs = || {
            all.iter().enumerate().find_map(|(rank, (values, _))| {
                let differing = all[0].0.iter().zip(values).find(|(first, own)| first != own);
                differing.map(|((name, first), (_, own))| {
                    format!("`{name}` is {first} on rank 0 and {own} on rank {rank}; set it alike")
                })
            })
        };
        match refused.or_else(differs) {
            Some(problem) => Err(Error::Learner { problem }),
            None => Ok(()),
        }
    }
}
