//! Every setting, in one place.

use std::{net::IpAddr, time::Duration};

use crate::{Error, Result, auth::Secret};

/// How a process group behaves. Build it in code, or read it from the environment once.
///
/// ```
/// use std::time::Duration;
///
/// let config = drumline::Config { timeout: Duration::from_secs(60), ..Default::default() };
/// assert_eq!(config.all_reduce, None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// How long start-up and every collective may take. `DRUMLINE_TIMEOUT_S`, in seconds; 600 s
    /// unless set.
    pub timeout: Duration,

    /// The algorithm of `all_reduce`, by name (`direct`, `doubling`, `binomial`), the same on
    /// all ranks. `DRUMLINE_ALL_REDUCE`; chosen by size unless set. It never changes a result.
    pub all_reduce: Option<String>,

    /// The address to listen on for peers. `DRUMLINE_BIND_ADDRESS`; unless set, the one from
    /// which this host reaches the master. Nothing listens there unless a rank is on another host.
    pub bind_address: Option<IpAddr>,

    /// The network interface to listen on for peers, by name (`eth1`), instead of
    /// `bind_address`. `DRUMLINE_INTERFACE`.
    pub interface: Option<String>,

    /// Whether ranks of one host and user talk over Unix sockets. `DRUMLINE_UNIX_SOCKETS`, 0 or
    /// 1; 1 unless set. Without, they talk over TCP as if on several hosts: to measure or test it.
    pub unix_sockets: bool,

    /// What the processes of the job prove to each other. `DRUMLINE_SECRET` or
    /// `DRUMLINE_SECRET_FILE`; `drumline run` makes a fresh one for every job.
    pub secret: Option<Secret>,

    /// Whether to meet through a store that other machines can reach and that asks for no secret,
    /// such as torchrun's. `DRUMLINE_TRUST_STORE`, 0 or 1; 0 unless set. The job is then only as
    /// safe as the network.
    pub trust_store: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            timeout: Duration::from_secs(600),
            all_reduce: None,
            bind_address: None,
            interface: None,
            unix_sockets: true,
            secret: None,
            trust_store: false,
        }
    }
}

impl Config {
    /// Reads the `DRUMLINE_*` variables of the environment.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] names the variable that cannot be understood.
    pub fn from_env() -> Result<Config> {
        let config = Config::from_variables(|name| std::env::var(name).ok())?;
        Ok(Config { secret: Secret::from_env()?, ..config })
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Config> {
        let mut config = Config::default();
        if let Some(text) = variable("DRUMLINE_TIMEOUT_S") {
            config.timeout = text
                .parse()
                .ok()
                .filter(|seconds| *seconds > 0.0)
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .ok_or_else(|| invalid("DRUMLINE_TIMEOUT_S", &text, "seconds, more than 0"))?;
        }
        config.all_reduce = variable("DRUMLINE_ALL_REDUCE");
        if let Some(text) = variable("DRUMLINE_BIND_ADDRESS") {
            let address = text
                .parse()
                .map_err(|_| invalid("DRUMLINE_BIND_ADDRESS", &text, "an IP address"))?;
            config.bind_address = Some(address);
        }
        config.interface = variable("DRUMLINE_INTERFACE");
        for (name, setting) in [
            ("DRUMLINE_UNIX_SOCKETS", &mut config.unix_sockets),
            ("DRUMLINE_TRUST_STORE", &mut config.trust_store),
        ] {
            if let Some(text) = variable(name) {
                *setting = match text.as_str() {
                    "0" => false,
                    "1" => true,
                    _ => return Err(invalid(name, &text, "0 or 1")),
                };
            }
        }
        Ok(config)
    }
}

fn invalid(setting: &str, value: &str, wanted: &str) -> Error {
    Error::InvalidSetting {
        setting: setting.to_owned(),
        problem: format!("{value:?} should be {wanted}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &'static str, value: &'static str) -> Result<Config> {
        Config::from_variables(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn settings_come_from_the_environment() {
        assert_eq!(Config::from_variables(|_| None).unwrap(), Config::default());
        assert_eq!(read("DRUMLINE_TIMEOUT_S", "0.5").unwrap().timeout, Duration::from_millis(500));
        let loopback = IpAddr::from([127, 0, 0, 1]);
        let config = read("DRUMLINE_BIND_ADDRESS", "127.0.0.1").unwrap();
        assert_eq!(config.bind_address, Some(loopback));
        assert!(!read("DRUMLINE_UNIX_SOCKETS", "0").unwrap().unix_sockets);
        assert!(read("DRUMLINE_TRUST_STORE", "1").unwrap().trust_store);
    }

    #[test]
    fn what_cannot_be_understood_is_named() {
        for (name, value) in [
            ("DRUMLINE_TIMEOUT_S", "soon"),
            ("DRUMLINE_TIMEOUT_S", "0"),
            ("DRUMLINE_TIMEOUT_S", "-1"),
            ("DRUMLINE_TIMEOUT_S", "inf"),
            ("DRUMLINE_BIND_ADDRESS", "localhost"),
            ("DRUMLINE_UNIX_SOCKETS", "no"),
            ("DRUMLINE_TRUST_STORE", ""),
        ] {
            let error = read(name, value).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
    }
}
