//! How far a measurement is: a line on stderr that is drawn again and again. It is drawn on a terminal only.

use std::{
    env,
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

/// How often the line is drawn at most.
const EVERY: Duration = Duration::from_millis(100);

/// How many parts of a measurement are done. All parts are taken to be equally long.
pub(crate) struct Progress {
    what: &'static str,
    parts: usize,
    done: usize,
    began: Instant,
    drawn: Option<Instant>,
    is_shown: bool,
}

impl Progress {
    /// Shows nothing where `is_wanted` is false, or where nobody sees it.
    pub(crate) fn new(what: &'static str, parts: usize, is_wanted: bool) -> Progress {
        // The launcher's variable: its terminal draws what ends with a carriage return.
        let behind_launcher = env::var_os("DRUMLINE_TERMINAL_COLUMNS").is_some();
        let is_shown = is_wanted && (behind_launcher || io::stderr().is_terminal());
        Progress { what, parts, done: 0, began: Instant::now(), drawn: None, is_shown }
    }

    /// One part more is done.
    pub(crate) fn step(&mut self) {
        self.done += 1;
        if self.is_shown && self.drawn.is_none_or(|then| then.elapsed() >= EVERY) {
            self.drawn = Some(Instant::now());
            draw(&line(self.what, self.done, self.parts, self.began.elapsed()));
        }
    }

    /// Something is printed next: the line goes away.
    pub(crate) fn clear(&mut self) {
        if self.drawn.take().is_some() {
            draw("");
        }
    }
}

/// `measuring  12/48   25 %  8.2/s  4 s left`.
fn line(what: &str, done: usize, parts: usize, spent: Duration) -> String {
    let rate = done as f64 / spent.as_secs_f64().max(1e-9);
    let left = parts.saturating_sub(done) as f64 / rate;
    let percent = done * 100 / parts.max(1);
    format!("{what}  {done}/{parts}  {percent:>3} %  {rate:.1}/s  {left:.0} s left")
}

/// Replaces the line by `text`. An error is ignored: a measurement does not need the line.
fn draw(text: &str) {
    let mut stderr = io::stderr().lock();
    // A terminal wants its line cleared; the launcher does so itself.
    let clear = if stderr.is_terminal() { "\r\x1b[K" } else { "" };
    let _ = write!(stderr, "{clear}{text}\r").and_then(|()| stderr.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_has_the_rate_and_the_time_that_is_left() {
        let text = line("measuring", 12, 48, Duration::from_secs(3));
        assert_eq!(text, "measuring  12/48   25 %  4.0/s  9 s left");
        assert!(line("measuring", 0, 0, Duration::ZERO).contains("0/0"), "no division by zero");
    }
}
