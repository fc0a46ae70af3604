//! What shown lines begin with.

use std::time::SystemTime;

use crate::{Job, clock::utc, world::World};

/// The beginning of lines: by default nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prefix {
    /// What stands around the times.
    around_times: Vec<String>,
    /// What follows: in a line, and in one that continues the line before.
    ends: [&'static str; 2],
}

impl Prefix {
    fn rank(rank: usize, width: usize, is_coloured: bool) -> Prefix {
        // Cyan, yellow, green, magenta, blue, red.
        const COLOURS: [u8; 6] = [36, 33, 32, 35, 34, 31];
        let (on, off) = match is_coloured {
            true => (format!("\x1b[{}m", COLOURS[rank % COLOURS.len()]), "\x1b[0m"),
            false => (String::new(), ""),
        };
        let pad = width.saturating_sub(rank.to_string().len());
        Prefix { around_times: vec![format!("{on}[{rank}]{off}{:pad$}", "")], ends: [" ", "+"] }
    }

    /// A template, whose macros other than `${time}` have these values.
    fn template(template: &str, values: &[(&str, &str)]) -> Prefix {
        let (text, ends) = match template.strip_suffix(' ') {
            Some(text) => (text, [" ", "+"]),
            None => (template, ["", "+"]),
        };
        let (mut around_times, mut now) = (Vec::new(), String::new());
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            now.push_str(before);
            let macro_and_rest = after.split_once('}');
            let value = |name| values.iter().find(|(known, _)| *known == name);
            match macro_and_rest.map(|(name, rest)| (name, value(name), rest)) {
                Some(("time", _, behind)) => {
                    around_times.push(std::mem::take(&mut now));
                    rest = behind;
                }
                Some((_, Some((_, value)), behind)) => {
                    now.push_str(value);
                    rest = behind;
                }
                Some((_, None, _)) | None => {
                    now.push_str("${");
                    rest = after;
                }
            }
        }
        around_times.push(now + rest);
        Prefix { around_times, ends }
    }

    /// Appends the beginning of a line, or of one that continues the line before.
    pub(crate) fn write(&self, is_continued: bool, to: &mut Vec<u8>) {
        let mut now = None;
        for (i, text) in self.around_times.iter().enumerate() {
            if i > 0 {
                let now = now.get_or_insert_with(|| utc(SystemTime::now()));
                to.extend_from_slice(now.as_bytes());
            }
            to.extend_from_slice(text.as_bytes());
        }
        to.extend_from_slice(self.ends[usize::from(is_continued)].as_bytes());
    }

    /// How many characters it has.
    pub(crate) fn width(&self) -> usize {
        let mut text = Vec::new();
        self.write(false, &mut text);
        String::from_utf8_lossy(&text).chars().count()
    }
}

/// What the beginnings of the lines of all ranks have in common.
#[derive(Clone, Debug)]
pub(crate) struct Labels {
    template: Option<String>,
    role: String,
    host: String,
    first_rank: usize,
    /// The width of a rank, in characters.
    rank_width: usize,
}

impl Labels {
    pub(crate) fn of(job: &Job, world: &World) -> Labels {
        Labels {
            template: job.logs.prefix.clone(),
            role: job.role.clone(),
            host: host_name(),
            first_rank: world.first_rank,
            rank_width: world.size.saturating_sub(1).to_string().len(),
        }
    }

    pub(crate) fn prefix(&self, local_rank: usize, is_coloured: bool) -> Prefix {
        let rank = self.first_rank + local_rank;
        let Some(template) = &self.template else {
            return Prefix::rank(rank, self.rank_width, is_coloured);
        };
        let values = [
            ("rank", &*rank.to_string()),
            ("local_rank", &*local_rank.to_string()),
            ("role_name", &self.role),
            ("hostname", &self.host),
        ];
        Prefix::template(template, &values)
    }
}

/// The name of this host, as it calls itself.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(prefix: &Prefix, is_continued: bool) -> String {
        let mut text = Vec::new();
        prefix.write(is_continued, &mut text);
        String::from_utf8(text).unwrap()
    }

    fn labels(template: Option<&str>) -> Labels {
        Labels {
            template: template.map(Into::into),
            role: "${time}r".into(),
            host: "node7".into(),
            first_rank: 8,
            rank_width: 2,
        }
    }

    #[test]
    fn ranks_are_padded_and_coloured() {
        let of = |rank, is_coloured| labels(None).prefix(rank, is_coloured);
        assert_eq!(written(&of(1, false), false), "[9]  ");
        assert_eq!(written(&of(2, false), true), "[10]+");
        assert_eq!(written(&of(1, true), false), "\x1b[35m[9]\x1b[0m  ");
        assert_eq!(of(1, false).width(), 5);
    }

    #[test]
    fn templates_have_the_values_of_a_rank() {
        let of = |template| labels(Some(template)).prefix(1, true);
        for (template, text, continued) in [
            ("[${role_name}${local_rank}]:", "[${time}r1]:", "[${time}r1]:+"),
            ("${hostname} ${rank} ", "node7 9 ", "node7 9+"),
            ("$ ${x} ${rank", "$ ${x} ${rank", "$ ${x} ${rank+"),
            ("", "", "+"),
        ] {
            assert_eq!(written(&of(template), false), text);
            assert_eq!(written(&of(template), true), continued);
        }
    }

    #[test]
    fn times_are_those_of_each_line() {
        let prefix = labels(Some("${time}|${rank}|${time} ")).prefix(0, false);
        let text = written(&prefix, false);
        let (first, rest) = text.split_once('|').unwrap();
        assert_eq!(rest, format!("8|{first} "));
        assert!(first.ends_with('Z') && first.starts_with("20"), "{text}");
        assert_eq!(prefix.width(), 2 * 24 + 4);
    }
}
