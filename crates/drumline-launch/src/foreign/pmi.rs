//! The key-value space of a launcher, by PMI-1: lines on a socket that every rank inherits.
//!
//! ```text
//! rank ── cmd=get kvsname=kvs_1 key=word ──► launcher
//!      ◄─ cmd=get_result rc=0 value=... ────
//! ```
//!
//! Hydra kills all ranks if one of them ends after it has said anything and before `cmd=finalize`; behind that word it closes
//! the socket. Slurm lets a process begin only once. So a process that has shared a word is done with PMI, and the program
//! that it becomes cannot use MPI. Where a program shall use MPI, nothing is said here.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
};

use super::patience::Patience;
use crate::{Error, Result};

/// The launcher's end of PMI.
#[derive(Debug)]
pub(super) struct Pmi {
    stream: UnixStream,
    /// The name of the space, which is the job's.
    space: String,
    patience: Patience,
}

/// Longer than any answer that fits the protocol.
const LINE_MAX: usize = 4096;

/// What the word is called.
const KEY: &str = "drumline";

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

    /// All ranks get the word that one of them has.
    pub(super) fn share(mut self, word: Option<&str>) -> Result<String> {
        if let Some(word) = word {
            let put = format!("cmd=put kvsname={} key={KEY} value={word}", self.space);
            self.ask(&put)?.succeeds()?;
        }
        self.ask("cmd=barrier_in")?.succeeds()?;
        let found = self.get(KEY)?;
        self.ask("cmd=finalize")?;
        found.ok_or_else(|| refused(format!("after the barrier, {KEY} is not there")))
    }

    fn get(&mut self, key: &str) -> Result<Option<String>> {
        let answer = self.ask(&format!("cmd=get kvsname={} key={key}", self.space))?;
        match answer.succeeds() {
            Ok(()) if answer.of("found").is_ok_and(|found| found == "FALSE") => Ok(None),
            Ok(()) => answer.of("value").map(Some),
            Err(_) => Ok(None),
        }
    }

    fn ask(&mut self, line: &str) -> Result<Answer> {
        self.stream.write_all(format!("{line}\n").as_bytes()).map_err(broken)?;
        let mut text = Vec::new();
        // Byte by byte: what follows belongs to the program.
        loop {
            if !self.patience.wait_for(&self.stream) {
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

/// One line of the launcher.
struct Answer {
    to: String,
    text: String,
}

impl Answer {
    fn of(&self, name: &str) -> Result<String> {
        let mut words = self.text.split(' ').filter_map(|word| word.split_once('='));
        let value = words.find(|(known, _)| *known == name).map(|(_, value)| value.to_owned());
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
    Error::not_agreed(format!(
        "ask the launcher, by PMI: {problem}; set MASTER_ADDR and MASTER_PORT for all ranks instead, and \
         DRUMLINE_SECRET_FILE"
    ))
}

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
                            "finalize" => "cmd=finalize_ack".to_owned(),
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
    fn all_ranks_share_the_word_of_one() {
        for insists in [false, true] {
            let (ours, theirs): (Vec<_>, Vec<_>) =
                (0..3).map(|_| UnixStream::pair().unwrap()).unzip();
            thread::scope(|scope| {
                scope.spawn(|| serve(theirs, insists));
                let ranks = ours.into_iter().enumerate().map(|(rank, stream)| {
                    scope.spawn(move || {
                        let pmi = Pmi::open(stream, insists, patience()).unwrap();
                        assert_eq!(pmi.space, "kvs_1");
                        pmi.share((rank == 0).then_some("a,1")).unwrap()
                    })
                });
                for rank in ranks.collect::<Vec<_>>() {
                    assert_eq!(rank.join().unwrap(), "a,1");
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
        theirs.write_all(b"kvsname=k\n").unwrap();
        let pmi = Pmi::open(ours, false, Patience::new(Duration::from_millis(50))).unwrap();
        let error = pmi.share(None).unwrap_err().to_string();
        assert!(
            error.contains("not all ranks have come") && error.contains("--timeout"),
            "{error}"
        );
    }
}
