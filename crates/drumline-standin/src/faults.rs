//! Calls that fail on request.

use std::collections::BTreeMap;

/// The n-th later call fails with a code.
#[derive(Clone, Debug)]
struct Fault {
    /// The function, without the version at its end. With a star at the end: all whose names begin so.
    name: String,
    /// Calls until then, this one included.
    left: u32,
    code: i32,
}

/// As a code: the process is killed in the call, so that nothing of it runs on.
pub(crate) const KILLED: i32 = -libc::SIGKILL;

#[derive(Debug, Default)]
pub(crate) struct Faults {
    faults: Vec<Fault>,
    calls: BTreeMap<&'static str, u64>,
    /// The function whose call has failed last.
    failed: Option<&'static str>,
}

impl Faults {
    /// Those of a variable `name:nth:code,...`.
    pub(crate) fn of_variable(text: &str) -> Self {
        let mut faults = Faults::default();
        for fault in text.split(',') {
            let mut parts = fault.split(':');
            if let (Some(name), Some(Ok(nth)), Some(Ok(code))) =
                (parts.next(), parts.next().map(str::parse), parts.next().map(str::parse))
            {
                faults.add(name, nth, code);
            }
        }
        faults
    }

    pub(crate) fn add(&mut self, name: &str, nth: u32, code: i32) {
        self.faults.push(Fault { name: plain(name).to_owned(), left: nth.max(1), code });
    }

    /// Counts a call, and says with which code it must fail.
    pub(crate) fn call(&mut self, name: &'static str) -> Option<i32> {
        *self.calls.entry(name).or_default() += 1;
        let mut code = None;
        self.faults.retain_mut(|fault| {
            let meant = match fault.name.strip_suffix('*') {
                Some(beginning) => name.starts_with(beginning),
                None => plain(name) == fault.name,
            };
            fault.left -= u32::from(meant);
            if meant && fault.left == 0 {
                code = Some(fault.code);
            }
            fault.left > 0
        });
        if code.is_some() {
            self.failed = Some(name);
        }
        if code == Some(KILLED) {
            // SAFETY: takes a number.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        code
    }

    /// The function whose call has failed on request last.
    pub(crate) fn failed(&self) -> Option<&'static str> {
        self.failed
    }

    /// The calls so far of functions whose names begin so.
    pub(crate) fn calls(&self, prefix: &str) -> u64 {
        self.calls.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, count)| count).sum()
    }
}

/// A name without `_v2`.
fn plain(name: &str) -> &str {
    match name.rsplit_once("_v") {
        Some((plain, version)) if version.bytes().all(|it| it.is_ascii_digit()) => plain,
        _ => name,
    }
}
