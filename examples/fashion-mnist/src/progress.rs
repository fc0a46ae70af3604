//! Shows the progress of an epoch on stderr, on rank 0 only.
//!
//! - On a terminal, it draws a bar.
//! - Under `drumline run`, stderr is a pipe, and a variable has the width of the launcher's terminal. Then it
//!   draws the same bar: each update is a line that ends with a carriage return.
//! - Otherwise, it writes a line every ten seconds.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
    sync::Mutex,
    time::{Duration, Instant},
};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

/// The variable in which the launcher passes the width of its terminal.
const TERMINAL_COLUMNS: &str = "DRUMLINE_TERMINAL_COLUMNS";
/// Time between lines when there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Shows one epoch after the other.
pub(crate) struct Progress {
    shown: Shown,
    /// The title of the current epoch.
    title: String,
    bar: ProgressBar,
    last_line: Instant,
}

#[derive(Clone, Copy)]
enum Shown {
    Nothing,
    Bar,
    /// The same bar on the launcher's terminal, which has this many columns.
    LauncherBar(u16),
    Lines,
}

impl Progress {
    /// Shows something if this is rank 0.
    pub(crate) fn new(rank: usize) -> Self {
        let columns = || std::env::var(TERMINAL_COLUMNS).ok()?.parse().ok();
        let shown = match columns() {
            _ if rank != 0 => Shown::Nothing,
            _ if io::stderr().is_terminal() => Shown::Bar,
            Some(columns) => Shown::LauncherBar(columns),
            None => Shown::Lines,
        };
        Self { shown, title: String::new(), bar: ProgressBar::hidden(), last_line: Instant::now() }
    }

    /// Begins an epoch of `steps` steps, of which `done` are done.
    pub(crate) fn start(&mut self, title: String, steps: usize, done: usize) {
        const TEMPLATE: &str =
            "{prefix} {wide_bar:.cyan/dim} {percent:>3} %  {msg}  {per_sec:>9}  {eta:>3} left";
        let target = match self.shown {
            Shown::Nothing | Shown::Lines => ProgressDrawTarget::hidden(),
            Shown::Bar => ProgressDrawTarget::stderr(),
            Shown::LauncherBar(columns) => {
                let launcher = Launcher { columns, line: Mutex::default() };
                ProgressDrawTarget::term_like_with_hz(Box::new(launcher), 10)
            }
        };
        let style = ProgressStyle::with_template(TEMPLATE)
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("━╸─");
        self.bar = ProgressBar::with_draw_target(Some(steps as u64), target)
            .with_style(style)
            .with_position(done as u64)
            .with_prefix(title.clone());
        self.title = title;
        self.last_line = Instant::now();
    }

    /// Adds a step with this loss.
    pub(crate) fn step(&mut self, loss: f32) {
        match self.shown {
            Shown::Nothing => {}
            Shown::Bar | Shown::LauncherBar(_) => {
                self.bar.set_message(format!("loss {loss:.4}"));
                self.bar.inc(1);
            }
            Shown::Lines => {
                self.bar.inc(1);
                if self.last_line.elapsed() >= LINE_INTERVAL {
                    self.last_line = Instant::now();
                    let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
                    let percent = done * 100 / all.max(1);
                    // The reader may have closed the pipe. Training goes on.
                    let (rate, left) = (self.bar.per_sec(), HumanDuration(self.bar.eta()));
                    let _ = writeln!(
                        io::stderr(),
                        "{} {percent} %  loss {loss:.4}  {rate:.1} steps/s  {left:#} left",
                        self.title
                    );
                }
            }
        }
    }

    /// Ends the epoch and removes the bar.
    pub(crate) fn finish(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Draws through the launcher. A flush sends the last line with a carriage return.
struct Launcher {
    columns: u16,
    line: Mutex<String>,
}

impl Launcher {
    fn line(&self) -> std::sync::MutexGuard<'_, String> {
        self.line.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl TermLike for Launcher {
    fn width(&self) -> u16 {
        self.columns
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.write_str(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.line().push_str(text);
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.line().clear();
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let line = std::mem::take(&mut *self.line());
        let mut stderr = io::stderr().lock();
        write!(stderr, "{}\r", line.trim_end())?;
        stderr.flush()
    }

    // There is one line only.
    fn move_cursor_up(&self, _n: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _n: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _n: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _n: usize) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launcher").field("columns", &self.columns).finish()
    }
}
