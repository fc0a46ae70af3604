//! The key-value space of a launcher, by PMI-1: lines on a socket that every rank inherits.
//!
//! ```text
//! rank ── cmd=get kvsname=kvs_1 key=word ──► launcher
//!      ◄─ cmd=get_result rc=0 value=... ────
//! ```
//!
//! The program that this process becomes may use MPI, which begins anew on the same socket. Hydra answers without
//! `cmd=init`, and takes a process that has said nothing else for one without MPI: it may end as it likes. Slurm
//! insists on `cmd=init`. Nobody says `cmd=finalize`, after which hydra closes the socket.

use std::{
    io::{self, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
};

use super::patience::Patience;
use crate::{Error, Result};

/// The launcher's end of PMI.
#[derive(Debug)]
pub(super) struct Pmi {
    stream: UnixStream,
    /// The name of the space, which is the job's.
    pub(super) space: String,
    patience: Patience,
}

/// Longer than any answer that fits the protocol.
const LINE_MAX: usize = 4096;

/// How often ranks may agree in one job: a script may run `drumline env` again and again.
const ROUNDS_MAX: usize = 10_000;

impl Pmi {
    pub(super) fn open(stream: UnixStream, begins: bool, patience: Patience) -> Result<Pmi> {
        let mut pmi = Pmi { stream, space: String::new(), patience };
        if begins {
            pmi.ask("cmd=init pmi_version=1 pmi_subversion=1")?;
        }
        pmi.space = pmi.ask("cmd=get_my_kvsname")?.of("kvsname")?;
        Ok(pmi)
    }

    /// The hosts of the ranks, if the launcher tells them.
    pub(super) fn mapping(&mut self) -> Result<Option<String>> {
        self.get("PMI_process_mapping")
    }

    /// All ranks get the word that one of them has. A value cannot be changed: each round has a key of its own.
    pub(super) fn share(&mut self, word: Option<&str>) -> Result<String> {
        let mut round = 0;
        while self.get(&key(round))?.is_some() {
            round += 1;
            if round == ROUNDS_MAX {
                return Err(refused(format!("{ROUNDS_MAX} programs have met in one job")));
            }
        }
        // Nobody may write before everybody has looked.
        self.barrier()?;
        let (space, key) = (self.space.clone(), key(round));
        if let Some(word) = word {
            self.ask(&format!("cmd=put kvsname={space} key={key} value={word}"))?.succeeds()?;
        }
        self.barrier()?;
        let found = self.get(&key)?;
        found.ok_or_else(|| refused(format!("after the barrier, {key} is not there")))
    }

    fn get(&mut self, key: &str) -> Result<Option<String>> {
        let answer = self.ask(&format!("cmd=get kvsname={} key={key}", self.space))?;
        match answer.succeeds() {
            Ok(()) if answer.of("found").is_ok_and(|found| found == "FALSE") => Ok(None),
            Ok(()) => answer.of("value").map(Some),
            Err(_) => Ok(None),
        }
    }

    fn barrier(&mut self) -> Result<()> {
        self.ask("cmd=barrier_in")?.succeeds()
    }

    fn ask(&mut self, line: &str) -> Result<Answer> {
        self.stream.write_all(format!("{line}\n").as_bytes()).map_err(broken)?;
        let mut text = Vec::new();
        // Byte by byte: what follows belongs to the program.
        loop {
            if !self.patience.wait_for(&self.stream.as_fd())? {
                let barrier = line.starts_with("cmd=barrier");
                let what = if barrier {
                    "not all ranks have come"
                } else {
                    "the launcher does not answer"
                };
                return Err(self.patience.over(format!("{what} ({line})")));
            }
            let mut byte = [0];
            match self.stream.read(&mut byte).map_err(broken)? {
                0 => return Err(broken(io::ErrorKind::UnexpectedEof.into())),
                _ if byte == *b"\n" => break,
                _ if text.len() == LINE_MAX => {
                    return Err(refused(format!("its answer to {line} has no end")));
                }
                _ => text.push(byte[0]),
            }
        }
        let text = String::from_utf8_lossy(&text).into_owned();
        Ok(Answer { to: line.split(' ').next().unwrap_or_default().to_owned(), text })
    }
}

fn key(round: usize) -> String {
    format!("drumline-{round}")
}

/// One line of the launcher.
struct Answer {
    to: String,
    text: String,
}

impl Answer {
    fn of(&self, name: &str) -> Result<String> {
        let words = self.text.split(' ').filter_map(|word| word.split_once('='));
        let value =
            words.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_owned());
        value.ok_or_else(|| {
            refused(format!("its answer to {} has no {name}: {}", self.to, self.text))
        })
    }

    fn succeeds(&self) -> Result<()> {
        match self.of("rc") {
            Ok(code) if code != "0" => {
                Err(refused(format!("it refuses {}: {}", self.to, self.text)))
            }
            // MPICH's barrier has no code.
            _ => Ok(()),
        }
    }
}

fn broken(error: io::Error) -> Error {
    refused(format!("the connection of PMI_FD is broken ({error})"))
}

fn refused(problem: String) -> Error {
    Error::NotAgreed { problem: format!("ask the launcher, by PMI: {problem}; {INSTEAD}") }
}

const INSTEAD: &str =
    "set MASTER_ADDR and MASTER_PORT for all ranks instead, and DRUMLINE_SECRET_FILE";

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        io::{BufRead, BufReader},
        sync::{Barrier, Mutex},
        thread,
        time::Duration,
    };

    use super::*;

    /// A server of PMI for `ends`, as hydra, or as Slurm, which insists on a beginning.
    fn serve(ends: Vec<UnixStream>, insists: bool) {
        let (barrier, values) =
            (Barrier::new(ends.len()), Mutex::new(BTreeMap::<String, String>::new()));
        thread::scope(|scope| {
            for end in ends {
                let (barrier, values) = (&barrier, &values);
                scope.spawn(move || {
                    let mut begun = !insists;
                    let mut lines = BufReader::new(&end).lines();
                    while let Some(Ok(line)) = lines.next() {
                        let words: BTreeMap<_, _> =
                            line.split(' ').filter_map(|it| it.split_once('=')).collect();
                        let answer = match words["cmd"] {
                            "init" if insists && !begun => {
                                "cmd=response_to_init rc=0 pmi_version=1".to_owned()
                            }
                            _ if !begun => return,
                            "get_my_kvsname" => "cmd=my_kvsname kvsname=kvs_1".to_owned(),
                            "barrier_in" => {
                                barrier.wait();
                                "cmd=barrier_out".to_owned()
                            }
                            "get" => match values.lock().unwrap().get(words["key"]) {
                                Some(value) => format!("cmd=get_result rc=0 value={value}"),
                                None => "cmd=get_result rc=1".to_owned(),
                            },
                            "put" => {
                                let old = values
                                    .lock()
                                    .unwrap()
                                    .insert(words["key"].into(), words["value"].into());
                                format!("cmd=put_result rc={}", if old.is_none() { 0 } else { -1 })
                            }
                            _ => "cmd=unknown rc=-1".to_owned(),
                        };
                        begun = true;
                        let _ = writeln!(&end, "{answer}");
                    }
                });
            }
        });
    }

    fn patience() -> Patience {
        Patience::new(Duration::from_secs(60))
    }

    #[test]
    fn all_ranks_share_the_word_of_one_again_and_again() {
        for insists in [false, true] {
            let (ours, theirs): (Vec<_>, Vec<_>) =
                (0..3).map(|_| UnixStream::pair().unwrap()).unzip();
            thread::scope(|scope| {
                scope.spawn(|| serve(theirs, insists));
                let ranks = ours.into_iter().enumerate().map(|(rank, stream)| {
                    scope.spawn(move || {
                        let mut pmi = Pmi::open(stream, insists, patience()).unwrap();
                        assert_eq!(pmi.space, "kvs_1");
                        ["a,1", "b,2"].map(|word| pmi.share((rank == 0).then_some(word)).unwrap())
                    })
                });
                for rank in ranks.collect::<Vec<_>>() {
                    assert_eq!(rank.join().unwrap(), ["a,1", "b,2"]);
                }
            });
        }
    }

    #[test]
    fn a_launcher_that_answers_badly_is_an_error_with_a_remedy() {
        for (answer, part) in [
            ("", "broken"),
            ("cmd=my_kvsname\n", "no kvsname"),
            ("nonsense\n", "nonsense"),
            (&"a".repeat(LINE_MAX + 1), "no end"),
        ] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(answer.as_bytes()).unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            let error = Pmi::open(ours, false, patience()).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("MASTER_ADDR"), "{error}");
        }
    }

    #[test]
    fn a_rank_that_never_comes_ends_the_wait() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"kvsname=k\nrc=1\n").unwrap();
        let mut pmi = Pmi::open(ours, false, Patience::new(Duration::from_millis(50))).unwrap();
        let error = pmi.share(None).unwrap_err().to_string();
        assert!(
            error.contains("not all ranks have come") && error.contains("--timeout"),
            "{error}"
        );
    }
}
