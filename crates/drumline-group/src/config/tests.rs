use super::*;

fn read(name: &'static str, value: &'static str) -> Result<Config> {
    Config::from_variables(|asked| (asked == name).then(|| value.to_owned()))
}

#[test]
fn settings_come_from_the_environment() {
    assert_eq!(Config::from_variables(|_| None).unwrap(), Config::default());
    assert_eq!(read("DRUMLINE_TIMEOUT_S", "0.5").unwrap().timeout, Duration::from_millis(500));
    for endless in ["1e20", "1e300", "inf"] {
        assert_eq!(read("DRUMLINE_TIMEOUT_S", endless).unwrap().timeout, Duration::MAX);
    }
    assert_eq!(read("DRUMLINE_BACKEND", "hub").unwrap().backend.as_deref(), Some("hub"));
    let loopback = IpAddr::from([127, 0, 0, 1]);
    let config = read("DRUMLINE_BIND_ADDRESS", "127.0.0.1").unwrap();
    assert_eq!(config.bind_addresses, [loopback]);
    let two = read("DRUMLINE_BIND_ADDRESS", "127.0.0.1, ::1").unwrap().bind_addresses;
    assert_eq!(two, [loopback, "::1".parse().unwrap()]);
    let prices = read("DRUMLINE_PRICES", "measure").unwrap().prices;
    assert_eq!(prices, PriceSource::Measure);
    let ports = read("DRUMLINE_PORT_RANGE", "40000-40100").unwrap().port_range;
    assert_eq!(ports, Some(40_000..=40_100));
    assert_eq!(read("DRUMLINE_STREAMS", "4").unwrap().streams, 4);
    let name = read("DRUMLINE_SOCKET_IFNAME", "^docker").unwrap().socket_ifname;
    assert_eq!(name.as_deref(), Some("^docker"));
    let name = read("GLOO_SOCKET_IFNAME", "eth0,eth1").unwrap().socket_ifname;
    assert_eq!(name.as_deref(), Some("=eth0,=eth1"));
    let none = |name: &str| Some(["eth0", ""][usize::from(name == "DRUMLINE_SOCKET_IFNAME")]);
    let is_named = |name: &str| name.ends_with("SOCKET_IFNAME");
    let one = Config::from_variables(|it| none(it).filter(|_| is_named(it)).map(str::to_owned));
    assert_eq!(one.unwrap(), Config::default());
    for (name, value, streams) in [
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", 2),
        ("DRUMLINE_SOCKET_IFNAME", "eth0,eth1,ib0", 3),
        ("DRUMLINE_SOCKET_IFNAME", "^docker,wlan", 1),
        ("DRUMLINE_BIND_ADDRESS", "10.0.0.1,10.0.1.1", 2),
    ] {
        assert_eq!(read(name, value).unwrap().streams, streams, "{name}={value}");
    }
    let one = Config::from_variables(|name| match name {
        "GLOO_SOCKET_IFNAME" => Some("eth0,eth1".to_owned()),
        "DRUMLINE_STREAMS" => Some("1".to_owned()),
        _ => None,
    });
    assert_eq!(one.unwrap().streams, 1);
    assert!(!read("DRUMLINE_UNIX_SOCKETS", "0").unwrap().unix_sockets);
    assert!(read("DRUMLINE_SPREAD_OVER_CORES", "1").unwrap().spread_over_cores);
    assert!(read("DRUMLINE_TRUST_STORE", "1").unwrap().trust_store);
    assert!(!read("DRUMLINE_SHARED_MEMORY", "0").unwrap().shared_memory);
    assert_eq!(read("DRUMLINE_WARN_AFTER_S", "2").unwrap().warn_after, Duration::from_secs(2));
    let bytes = read("DRUMLINE_REGISTERED_BYTES_MAX", "4096").unwrap().registered_bytes_max;
    assert_eq!(bytes, Some(4096));
    assert_eq!(read("DRUMLINE_MEMORY_NODE", "1").unwrap().memory_node, Some(1));
    assert_eq!(read("DRUMLINE_MIN_RANKS", "3").unwrap().min_ranks, Some(3));
    assert_eq!(read("DRUMLINE_WINDOW_BYTES", "65536").unwrap().window_bytes, 65_536);
    let bytes = read("DRUMLINE_STORE_BYTES_MAX", "4096").unwrap().store_bytes_max;
    assert_eq!(bytes, 4096);
    assert_eq!(read("DRUMLINE_OBJECT_BYTES_MAX", "7").unwrap().object_bytes_max, 7);
    let order = read("DRUMLINE_SUM_ORDER", "placement").unwrap().sum_order;
    assert_eq!(order, SumOrder::Placement);
    assert_eq!(read("DRUMLINE_ROUNDING", "host").unwrap().rounding, Rounding::Host);
    assert_eq!(read("DRUMLINE_SECURITY", "tls").unwrap().security, Level::Tls);
    assert_eq!(read("DRUMLINE_DEBUG", "info").unwrap().debug, DebugLevel::Info);
    assert_eq!(read("TORCH_DISTRIBUTED_DEBUG", "DETAIL").unwrap().debug, DebugLevel::Detail);
    assert_eq!(read("DRUMLINE_TRACE", "runs/7").unwrap().trace, Some(Trace::to("runs/7")));
}

#[test]
fn what_cannot_be_understood_is_named() {
    for (name, value) in [
        ("DRUMLINE_TIMEOUT_S", "soon"),
        ("DRUMLINE_STREAMS", "0"),
        ("DRUMLINE_STREAMS", "17"),
        ("DRUMLINE_STREAMS", "two"),
        ("DRUMLINE_SECURITY", "integrity"),
        ("DRUMLINE_MEMORY_NODE", "all"),
        ("DRUMLINE_MIN_RANKS", "0"),
        ("DRUMLINE_MIN_RANKS", "half"),
        ("DRUMLINE_WARN_AFTER_S", "never"),
        ("DRUMLINE_SHARED_MEMORY", "yes"),
        ("DRUMLINE_WINDOW_BYTES", "1M"),
        ("DRUMLINE_REGISTERED_BYTES_MAX", "1G"),
        ("DRUMLINE_OBJECT_BYTES_MAX", "-1"),
        ("DRUMLINE_SUM_ORDER", "host"),
        ("DRUMLINE_ROUNDING", "twice"),
        ("DRUMLINE_SECURITY", "TLS"),
        ("DRUMLINE_DEBUG", "all"),
        ("TORCH_DISTRIBUTED_DEBUG", "1"),
        ("DRUMLINE_TRACE_BYTES_MAX", "1G"),
        ("DRUMLINE_TIMEOUT_S", "0"),
        ("DRUMLINE_TIMEOUT_S", "-1"),
        ("DRUMLINE_TIMEOUT_S", "NaN"),
        ("DRUMLINE_TIMEOUT_S", "-inf"),
        ("DRUMLINE_WARN_AFTER_S", "nan"),
        ("DRUMLINE_BIND_ADDRESS", "localhost"),
        ("DRUMLINE_BIND_ADDRESS", "127.0.0.1,"),
        ("DRUMLINE_PORT_RANGE", "40000"),
        ("DRUMLINE_PORT_RANGE", "0-9"),
        ("DRUMLINE_PORT_RANGE", "9-8"),
        ("DRUMLINE_PORT_RANGE", "1-65536"),
        ("DRUMLINE_UNIX_SOCKETS", "no"),
        ("DRUMLINE_TRUST_STORE", ""),
    ] {
        let error = read(name, value).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(value), "{error}");
    }
}
