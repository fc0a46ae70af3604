//! Ranks of which the same can be said.

use std::{
    collections::BTreeSet,
    fmt::{self, Display, Formatter},
};

/// Ranks, grouped by a text.
#[derive(Debug, Default)]
pub(crate) struct Groups(Vec<(String, BTreeSet<usize>)>);

impl Groups {
    pub(crate) fn add(&mut self, rank: usize, text: String) {
        match self.0.iter_mut().find(|(known, _)| *known == text) {
            Some((_, ranks)) => {
                ranks.insert(rank);
            }
            None => self.0.push((text, BTreeSet::from([rank]))),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// `0, 2-7 (SIGTERM); 8 (exit code 1)`
impl Display for Groups {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (i, (text, ranks)) in self.0.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { "; " })?;
            let ranks: Vec<usize> = ranks.iter().copied().collect();
            let runs = ranks.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
                [first, .., last] => format!("{first}-{last}"),
                run => run[0].to_string(),
            });
            write!(f, "{} ({text})", runs.collect::<Vec<_>>().join(", "))?;
        }
        Ok(())
    }
}
