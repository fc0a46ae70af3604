//! What could not be tried on this machine, and why.

use std::fmt;

/// Parts of the check that were left out.
#[derive(Debug, Default)]
pub(crate) struct LeftOut(Vec<String>);

impl LeftOut {
    /// `why` also says what to do about it, where something can be done.
    pub(crate) fn add(&mut self, what: &str, why: impl fmt::Display) {
        let why = why.to_string();
        let lines: Vec<&str> = why.lines().map(str::trim).filter(|it| !it.is_empty()).collect();
        self.0.push(format!("{what}: {}", lines.join("; ")));
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            [] => write!(f, "left out: nothing"),
            all => write!(f, "left out: {}", all.join("\nleft out: ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_has_a_line_of_its_own() {
        let mut left_out = LeftOut::default();
        assert_eq!(left_out.to_string(), "left out: nothing");
        left_out.add("torch", "python3 has no torch");
        left_out.add("NCCL", "found none; tried\n  libnccl.so.2\n  librccl.so.1");
        assert_eq!(
            left_out.to_string(),
            "left out: torch: python3 has no torch\n\
             left out: NCCL: found none; tried; libnccl.so.2; librccl.so.1"
        );
    }
}
