//! Every setting, in one place.

use std::{net::IpAddr, time::Duration};

use crate::{Error, Result};

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

    /// The algorithm of `all_reduce`, by name (`direct`, `halving`, `doubling`, `gather`,
    /// `binomial`), the same on all ranks. `DRUMLINE_ALL_REDUCE`; chosen by size unless set. It never changes a result.
    pub all_reduce: Option<String>,

    /// The address to listen on for peers. `DRUMLINE_BIND_ADDRESS`; unless set, the one from
    /// which this host reaches the master, so loopback for a job on one host.
    pub bind_address: Option<IpAddr>,
}

impl Default for Config {
    fn default() -> Config {
        Config { timeout: Duration::from_secs(600), all_reduce: None, bind_address: None }
    }
}

impl Config {
    /// Reads the `DRUMLINE_*` variables of the environment.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] names the variable that cannot be understood.
    pub fn from_env() -> Result<Config> {
        Config::from_variables(|name| std::env::var(name).ok())
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
    }

    #[test]
    fn what_cannot_be_understood_is_named() {
        for (name, value) in [
            ("DRUMLINE_TIMEOUT_S", "soon"),
            ("DRUMLINE_TIMEOUT_S", "0"),
            ("DRUMLINE_TIMEOUT_S", "-1"),
            ("DRUMLINE_TIMEOUT_S", "inf"),
            ("DRUMLINE_BIND_ADDRESS", "localhost"),
        ] {
            let error = read(name, value).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
    }
}
