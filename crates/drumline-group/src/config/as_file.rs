//! Settings in files: [`Config`] by serde.
//!
//! A setting has the name, the values and the checks of its variable, so there is one parser for both.

use std::{cell::RefCell, collections::BTreeMap, fmt, time::Duration};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, SeqAccess, Visitor},
    ser::{self, SerializeMap},
};

use super::Config;
use crate::{ErrorKind, algorithms::PriceSource};

const PREFIX: &str = "DRUMLINE_";

impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Config, D::Error> {
        let settings = BTreeMap::<String, Text>::deserialize(deserializer)?;
        let known = RefCell::new(Vec::new());
        let config = Config::from_variables(|variable| {
            let name = variable.strip_prefix(PREFIX)?.to_lowercase();
            let value = settings.get(&name).map(|text| text.0.clone());
            known.borrow_mut().push(name);
            value
        });
        let config = config.map_err(|error| match error.message().split_once(": ") {
            Some((setting, problem)) if error.kind() == ErrorKind::Setting => {
                let name = setting.trim_start_matches(PREFIX).to_lowercase();
                de::Error::custom(format_args!("{name}: {problem}"))
            }
            _ => de::Error::custom(error),
        })?;
        let known = known.into_inner();
        match settings.keys().find(|name| !known.contains(name)) {
            None => Ok(config),
            Some(name) if name.starts_with("secret") => Err(de::Error::custom(format_args!(
                "{name}: a secret is no setting of a file that others may read; set \
                 DRUMLINE_SECRET_FILE"
            ))),
            Some(name) => Err(de::Error::custom(format_args!(
                "there is no setting {name:?}; there are {}",
                known.join(", ")
            ))),
        }
    }
}

/// A value in the form that the setting's variable would have.
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Text, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Text;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a number, true, false, or a list of them")
    }

    fn visit_str<E>(self, value: &str) -> Result<Text, E> {
        Ok(Text(value.to_owned()))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Text, E> {
        Ok(Text(u8::from(value).to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Text, E> {
        Ok(Text(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Text, E> {
        Ok(Text(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Text, E> {
        Ok(Text(value.to_string()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Text, A::Error> {
        let mut parts = Vec::new();
        while let Some(Text(part)) = list.next_element()? {
            parts.push(part);
        }
        Ok(Text(parts.join(",")))
    }
}

impl Serialize for Config {
    /// Leaves out settings without a value, and the secret.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Named one by one, so that the compiler notices a new field.
        let Config {
            timeout,
            backend,
            mpi_library,
            cuda_library,
            nccl_library,
            all_reduce,
            prices,
            bind_addresses,
            socket_ifname,
            port_range,
            streams,
            unix_sockets,
            spread_over_cores,
            shared_memory,
            memory_node,
            window_bytes,
            registered_bytes_max,
            object_bytes_max,
            sum_order,
            rounding,
            warn_after,
            debug,
            min_ranks,
            secret: _,
            security,
            trust_store,
            store_bytes_max,
            trace,
        } = self;
        let mut map = serializer.serialize_map(None)?;
        for (name, limit) in [("timeout_s", *timeout), ("warn_after_s", *warn_after)] {
            match limit == Duration::MAX {
                true => map.serialize_entry(name, "inf")?,
                false => map.serialize_entry(name, &limit.as_secs_f64())?,
            }
        }
        let prices = match prices {
            PriceSource::Default => None,
            PriceSource::Measure => Some("measure".to_owned()),
            PriceSource::File(path) => Some(text_of(path)?),
            PriceSource::Given(_) => {
                return Err(ser::Error::custom(
                    "prices: those that were given in code are in no file; name a file of prices",
                ));
            }
        };
        let ports = port_range.as_ref().map(|ports| format!("{}-{}", ports.start(), ports.end()));
        for (name, text) in [
            ("backend", backend.clone()),
            ("mpi_library", mpi_library.as_ref().map(|path| text_of(path)).transpose()?),
            ("cuda_library", cuda_library.as_ref().map(|path| text_of(path)).transpose()?),
            ("nccl_library", nccl_library.as_ref().map(|path| text_of(path)).transpose()?),
            ("all_reduce", all_reduce.clone()),
            ("prices", prices),
            ("socket_ifname", socket_ifname.clone()),
            ("port_range", ports),
            ("sum_order", Some(sum_order.name().to_owned())),
            ("rounding", Some(rounding.name().to_owned())),
            ("debug", Some(debug.name().to_owned())),
            ("security", Some(security.to_string())),
            ("trace", trace.as_ref().map(|trace| text_of(&trace.dir)).transpose()?),
        ] {
            if let Some(text) = text {
                map.serialize_entry(name, &text)?;
            }
        }
        if !bind_addresses.is_empty() {
            map.serialize_entry("bind_address", bind_addresses)?;
        }
        for (name, number) in [
            ("streams", Some(*streams as u64)),
            ("memory_node", memory_node.map(|node| node as u64)),
            ("min_ranks", min_ranks.map(|ranks| ranks as u64)),
            ("window_bytes", Some(*window_bytes as u64)),
            ("registered_bytes_max", registered_bytes_max.map(|bytes| bytes as u64)),
            ("object_bytes_max", Some(*object_bytes_max as u64)),
            ("store_bytes_max", Some(*store_bytes_max as u64)),
            ("trace_bytes_max", trace.as_ref().map(|trace| trace.bytes_max)),
        ] {
            if let Some(number) = number {
                map.serialize_entry(name, &number)?;
            }
        }
        for (name, switch) in [
            ("unix_sockets", unix_sockets),
            ("spread_over_cores", spread_over_cores),
            ("shared_memory", shared_memory),
            ("trust_store", trust_store),
        ] {
            map.serialize_entry(name, switch)?;
        }
        map.end()
    }
}

fn text_of<E: ser::Error>(path: &std::path::Path) -> Result<String, E> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| E::custom(format_args!("{} is no UTF-8", path.display())))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use drumline_schedule::{Rounding, SumOrder};
    use drumline_store::auth::{Level, Secret};

    use super::*;
    use crate::{config::DebugLevel, trace::Trace};

    fn read(json: &str) -> Result<Config, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn every_setting_but_the_secret_comes_back() {
        let mut trace = Trace::to("runs/7");
        trace.bytes_max = 5;
        let config = Config::default()
            .timeout(Duration::from_millis(1500))
            .backend("hub")
            .all_reduce("direct")
            .prices(PriceSource::File("prices.json".into()))
            .bind_addresses(vec![IpAddr::from([127, 0, 0, 1]), "::1".parse().unwrap()])
            .socket_ifname("^docker")
            .port_range(40_000..=40_100)
            .streams(4)
            .unix_sockets(false)
            .spread_over_cores(true)
            .shared_memory(false)
            .memory_node(1)
            .window_bytes(65_536)
            .registered_bytes_max(4096)
            .object_bytes_max(7)
            .sum_order(SumOrder::Placement)
            .rounding(Rounding::Host)
            .warn_after(Duration::MAX)
            .debug(DebugLevel::Detail)
            .min_ranks(3)
            .security(Level::Tls)
            .trust_store(true)
            .store_bytes_max(4096)
            .trace(trace);
        let secret = Secret::new("never to be written down").unwrap();
        let json = serde_json::to_string(&config.clone().secret(secret)).unwrap();
        assert!(!json.contains("never"), "{json}");
        assert_eq!(read(&json).unwrap(), config, "{json}");
        let json = serde_json::to_string(&Config::default()).unwrap();
        assert_eq!(read(&json).unwrap(), Config::default(), "{json}");
    }

    #[test]
    fn what_is_not_set_is_as_by_default() {
        let config = read(r#"{"timeout_s": 60, "shared_memory": false}"#).unwrap();
        let expected = Config::default().timeout(Duration::from_secs(60)).shared_memory(false);
        assert_eq!(config, expected);
    }

    #[test]
    fn mistakes_are_named() {
        for (json, named) in [
            (r#"{"timeout_s": "soon"}"#, "timeout_s: \"soon\" should be seconds"),
            (r#"{"timeout_s": -1}"#, "timeout_s: \"-1\" should be"),
            (r#"{"streams": 17}"#, "streams: \"17\" should be"),
            (r#"{"timeout": 5}"#, "no setting \"timeout\"; there are timeout_s, "),
            (r#"{"secret": "0123456789abcdef"}"#, "DRUMLINE_SECRET_FILE"),
            (r#"{"streams": null}"#, "a text, a number"),
            (r#"{"bind_address": ["localhost"]}"#, "should be IP addresses"),
        ] {
            let error = read(json).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
