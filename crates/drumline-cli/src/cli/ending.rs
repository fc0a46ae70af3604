//! How a job ends: times, and signals.

use std::time::Duration;

use clap::Args;
use drumline_launch::{
    OnSignal,
    supervisor::{Policy, Signal},
};

use super::{host::Host, nearest::nearest, time::time};

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
pub(super) struct EndingArgs {
    /// Time from the failure of a rank until the others are killed
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = time)]
    kill_after: Duration,

    /// Time from Ctrl-C or SIGTERM until the ranks are killed [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = time)]
    shutdown_timeout: Option<Duration>,

    /// Signals that are passed on to the ranks; `USR1=end`: it also ends the job, `HUP=pass`: it does not. Those that
    /// are not named keep their meaning
    #[arg(
        long,
        value_name = "SIGNALS",
        default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        value_parser = signals
    )]
    signals_to_handle: Signals,
}

impl EndingArgs {
    pub(super) fn policy(&self, host: &Host<'_>) -> Result<Policy, String> {
        let shutdown_timeout = match self.shutdown_timeout {
            Some(given) => given,
            None => host
                .parsed("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", time)?
                .unwrap_or(Policy::default().shutdown_timeout),
        };
        Ok(Policy { kill_after: self.kill_after, shutdown_timeout })
    }

    pub(super) fn signals(&self) -> Vec<(Signal, OnSignal)> {
        let Signals(changes) = &self.signals_to_handle;
        let changed = |signal| changes.iter().find(|(it, _)| *it == signal).copied();
        let usual = OnSignal::UNLESS_TOLD.map(|usual| changed(usual.0).unwrap_or(usual));
        let is_new = |(signal, _): &&(Signal, OnSignal)| usual.iter().all(|(it, _)| it != signal);
        usual.iter().chain(changes.iter().filter(is_new)).copied().collect()
    }
}

/// What becomes of the signals that an option names.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Signals(Vec<(Signal, OnSignal)>);

/// The signals that can be handled. Others stop a process, or belong to its own mistakes and children.
const KNOWN: [(&str, Signal); 13] = [
    ("TERM", Signal::TERM),
    ("INT", Signal::INT),
    ("HUP", Signal::HUP),
    ("QUIT", Signal::QUIT),
    ("USR1", Signal::USR1),
    ("USR2", Signal::USR2),
    ("ALRM", Signal::ALARM),
    ("VTALRM", Signal::VTALARM),
    ("PROF", Signal::PROF),
    ("PWR", Signal::POWER),
    ("WINCH", Signal::WINCH),
    ("XCPU", Signal::XCPU),
    ("IO", Signal::IO),
];

/// `SIGTERM,USR1=end,HUP=pass`.
fn signals(text: &str) -> Result<Signals, String> {
    let mut changes: Vec<(Signal, OnSignal)> = Vec::new();
    for entry in text.split(',').map(str::trim) {
        let (name, effect) = match entry.split_once('=') {
            None => (entry, None),
            Some((name, "end")) => (name, Some(OnSignal::EndsJob)),
            Some((name, "pass")) => (name, Some(OnSignal::PassedOn)),
            Some((name, other)) => {
                return Err(format!("{name} may be {name}=end or {name}=pass, not {other}"));
            }
        };
        let short = name.to_uppercase();
        let short = short.strip_prefix("SIG").unwrap_or(&short);
        let names = || KNOWN.iter().map(|(name, _)| *name);
        let Some((_, signal)) = KNOWN.iter().find(|(known, _)| *known == short) else {
            return Err(match nearest(short, names()) {
                Some(known) => format!("{name} cannot be handled; is it SIG{known}?"),
                None => {
                    format!(
                        "{name} cannot be handled, but these: {}",
                        Vec::from_iter(names()).join(", ")
                    )
                }
            });
        };
        let usual = OnSignal::UNLESS_TOLD.iter().find(|(known, _)| known == signal);
        let usual = usual.map_or(OnSignal::PassedOn, |(_, effect)| *effect);
        changes.retain(|(known, _)| known != signal);
        changes.push((*signal, effect.unwrap_or(usual)));
    }
    Ok(Signals(changes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_effects() {
        use OnSignal::{EndsJob, PassedOn};
        for (text, expected) in [
            ("SIGTERM,int", &[(Signal::TERM, EndsJob), (Signal::INT, EndsJob)][..]),
            ("SIGUSR1, XCPU", &[(Signal::USR1, PassedOn), (Signal::XCPU, PassedOn)]),
            ("USR1=end,HUP=pass", &[(Signal::USR1, EndsJob), (Signal::HUP, PassedOn)]),
            ("USR1,SIGUSR1=end", &[(Signal::USR1, EndsJob)]),
        ] {
            assert_eq!(signals(text), Ok(Signals(expected.to_vec())), "{text}");
        }
        for (text, part) in [
            ("SIGKILL", "SIGKILL cannot be handled, but these: TERM, INT"),
            ("SIGTREM", "is it SIGTERM?"),
            ("USR1=stop", "USR1=end or USR1=pass, not stop"),
            ("", "cannot be handled"),
        ] {
            let error = signals(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
