//! What all ranks of a job must know alike: the first rank decides it, and tells it as one word.

use drumline::auth::Secret;

use crate::{Error, Result};

/// What a rank has from its user. It wins over what the ranks agree on.
#[derive(Clone, Debug, Default)]
pub(super) struct Given {
    pub(super) address: Option<String>,
    pub(super) port: Option<u16>,
    pub(super) has_secret: bool,
}

/// What the first rank has decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Agreed {
    pub(super) address: String,
    pub(super) port: u16,
    /// `None`: the user has given one, which is told to nobody.
    pub(super) secret: Option<Secret>,
}

/// No server of PMI takes longer values. It has no blanks, `=` and `;`, which separate words there.
pub(super) const WORD_MAX: usize = 1000;

/// What stands for a secret that the user has given.
const OF_USER: &str = "given";

impl Agreed {
    pub(super) fn word(&self) -> Result<String> {
        let secret = self.secret.as_ref().map(|secret| String::from_utf8_lossy(secret.expose()));
        let word =
            format!("{},{},{}", self.address, self.port, secret.as_deref().unwrap_or(OF_USER));
        match word.len() <= WORD_MAX && Agreed::parse(&word).as_ref() == Some(self) {
            true => Ok(word),
            false => {
                let address = &self.address;
                let problem = format!("MASTER_ADDR={address}: neither a host name nor an address");
                Err(Error::foreign(problem))
            }
        }
    }

    pub(super) fn parse(word: &str) -> Option<Agreed> {
        let mut parts = word.split(',');
        let (address, port, secret) = (parts.next()?, parts.next()?, parts.next()?);
        let of_host = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
        let is_host = !address.is_empty() && address.chars().all(of_host) && parts.next().is_none();
        let secret = match secret {
            OF_USER => None,
            digits => Some(digits),
        };
        if !is_host || secret.is_some_and(|it| !it.chars().all(|c| c.is_ascii_hexdigit())) {
            return None;
        }
        let secret = secret.map(Secret::new).transpose().ok()?;
        Some(Agreed { address: address.into(), port: port.parse().ok()?, secret })
    }

    /// What rank `rank` uses, if its user has given `given`.
    pub(super) fn with(self, given: &Given, rank: usize) -> Result<Agreed> {
        let problem = match (given.port, given.has_secret, self.secret.is_none()) {
            (Some(port), ..) if port != self.port => {
                let first = self.port;
                format!("MASTER_PORT is {port} on rank {rank}, and the first rank has {first}")
            }
            (_, true, false) => format!(
                "rank {rank} has a DRUMLINE_SECRET or DRUMLINE_SECRET_FILE, and rank 0 has none"
            ),
            (_, false, true) => format!(
                "rank 0 has a DRUMLINE_SECRET or DRUMLINE_SECRET_FILE, and rank {rank} has none"
            ),
            _ => {
                let address = given.address.clone().unwrap_or(self.address);
                return Ok(Agreed { address, ..self });
            }
        };
        let remedy = "let the launcher pass the variable on to all ranks (mpirun -x, mpiexec -genvlist), or to none";
        Err(Error::foreign(format!("{problem}: {remedy}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreed(address: &str, secret: Option<Secret>) -> Agreed {
        Agreed { address: address.into(), port: 4711, secret }
    }

    #[test]
    fn a_word_comes_back_as_it_was() {
        for secret in [None, Some(Secret::random().unwrap())] {
            for address in ["127.0.0.1", "fe80::1%eth0", "node-0.cluster"] {
                let told = agreed(address, secret.clone());
                let word = told.word().unwrap();
                assert!(!word.contains([' ', '=', ';', '\n']), "{word}");
                assert_eq!(Agreed::parse(&word), Some(told));
            }
        }
        for bad in ["", "a b", "a,b", "a;b", &"a".repeat(WORD_MAX)] {
            assert!(agreed(bad, None).word().is_err(), "{bad}");
        }
        for bad in [
            "",
            "a",
            "a,1",
            "a,99999,given",
            "a,1,00",
            "a,1,given,",
            "a,1,gggggggggggggggggggggggggggggggg",
        ] {
            assert_eq!(Agreed::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_the_user_has_given_wins_and_must_be_everywhere_alike() {
        let secret = Secret::random().unwrap();
        let given = |address: Option<&str>, port, has_secret| Given {
            address: address.map(Into::into),
            port,
            has_secret,
        };
        let told = agreed("10.0.0.1", Some(secret));
        assert_eq!(told.clone().with(&Given::default(), 3).unwrap(), told);
        let named = told.clone().with(&given(Some("node0"), Some(4711), false), 3).unwrap();
        assert_eq!((&named.address[..], named.secret.is_some()), ("node0", true));
        let error = |told: Agreed, given| told.with(&given, 3).unwrap_err().to_string();
        let port = error(told.clone(), given(None, Some(1), false));
        assert!(port.contains("1 on rank 3") && port.contains("4711"), "{port}");
        assert!(error(told, given(None, None, true)).contains("rank 3 has a DRUMLINE_SECRET"));
        assert!(error(agreed("a", None), given(None, None, false)).contains("rank 3 has none"));
    }
}
