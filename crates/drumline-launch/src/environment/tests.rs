use std::{collections::BTreeMap, num::NonZeroUsize};

use super::*;

fn job(ranks: usize) -> Job {
    Job::new("train", NonZeroUsize::new(ranks).unwrap())
}

fn variables(job: &Job, rank: usize, inherited: &Inherited) -> BTreeMap<&'static str, String> {
    let rendezvous = Rendezvous {
        launcher: Endpoint::Unix("drumline-run-a1".into()),
        store: Endpoint::Unix("drumline-run-a1".into()),
        secret_file: Some("/proc/self/fd/100".into()),
        master: Some(([127, 0, 0, 1], 4711).into()),
        interface: None,
        run_id: "a1".into(),
    };
    let without_torch = Rendezvous { master: None, ..rendezvous.clone() };
    let world = World::alone(job, 0);
    let named = |name| {
        let list = worker(job, &world, &without_torch, rank, inherited);
        list.iter().any(|(known, _)| *known == name)
    };
    assert!(named("DRUMLINE_STORE") && !NOT_INHERITED.into_iter().any(named));
    let list = worker(job, &world, &rendezvous, rank, inherited);
    let map: BTreeMap<_, _> = list.iter().cloned().collect();
    assert_eq!(map.len(), list.len(), "a variable is set twice");
    map
}

#[test]
fn the_variables_are_those_of_torchrun_on_one_node_and_our_own() {
    let expected = [
        ("DRUMLINE_GIVEN", "OMP_NUM_THREADS=1 TORCHELASTIC_RUN_ID=a1"),
        ("DRUMLINE_LAUNCHER", "unix:@drumline-run-a1"),
        ("DRUMLINE_SECRET_FILE", "/proc/self/fd/100"),
        ("DRUMLINE_STEPS", "2"),
        ("DRUMLINE_STORE", "unix:@drumline-run-a1"),
        ("GROUP_RANK", "0"),
        ("GROUP_WORLD_SIZE", "1"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "3"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "4711"),
        ("OMP_NUM_THREADS", "1"),
        ("RANK", "2"),
        ("ROLE_NAME", "default"),
        ("ROLE_RANK", "2"),
        ("ROLE_WORLD_SIZE", "3"),
        ("TORCHELASTIC_MAX_RESTARTS", "0"),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
        ("TORCHELASTIC_RUN_ID", "a1"),
        ("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("WORLD_SIZE", "3"),
    ];
    let variables = variables(&job(3), 2, &Inherited::default());
    assert_eq!(variables, expected.map(|(k, v)| (k, v.to_owned())).into());
}

#[test]
fn ranks_count_over_all_hosts_and_a_virtual_local_rank_is_zero() {
    let job = Job { virtual_local_rank: true, role: "trainer".into(), ..job(2) };
    let world =
        World { attempt: 4, restart: 4, first_rank: 3, local_size: 2, size: 5, host: 1, hosts: 2 };
    let rendezvous = Rendezvous {
        launcher: Endpoint::Unix("x".into()),
        store: Endpoint::Unix("x".into()),
        secret_file: None,
        master: None,
        interface: Some("eth1".into()),
        run_id: "a1".into(),
    };
    let list = worker(&job, &world, &rendezvous, 1, &Inherited::default());
    let devices = |visible: &[(&'static str, &str)]| {
        let visible_devices = visible.iter().map(|(name, it)| (*name, (*it).to_owned())).collect();
        let inherited = Inherited { visible_devices, ..Inherited::default() };
        let list = worker(&job, &world, &rendezvous, 1, &inherited);
        let is_device = |(name, _): &(&str, String)| VISIBLE_DEVICES.contains(name);
        let told = list.into_iter().filter(is_device);
        told.map(|(name, device)| format!("{name}={device}")).collect::<Vec<_>>()
    };
    assert_eq!(devices(&[]), ["CUDA_VISIBLE_DEVICES=1"]);
    assert_eq!(devices(&[("CUDA_VISIBLE_DEVICES", "4,7")]), ["CUDA_VISIBLE_DEVICES=7"]);
    assert_eq!(devices(&[("HIP_VISIBLE_DEVICES", "GPU-a,GPU-b")]), ["HIP_VISIBLE_DEVICES=GPU-b"]);
    let of = |name| list.iter().find(|(known, _)| *known == name).unwrap().1.as_str();
    let named = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"].map(of);
    assert_eq!(named, ["4", "0", "5", "2", "1"]);
    let named = ["GROUP_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT"].map(of);
    assert_eq!(named, ["2", "trainer", "4"]);

    assert_eq!([INTERFACE_OF_GLOO, INTERFACE].map(of), ["eth1", ""]);
    for (has_interface, has_interface_of_gloo, set) in
        [(true, false, &[INTERFACE_OF_GLOO][..]), (false, true, &[]), (true, true, &[])]
    {
        let inherited = Inherited { has_interface, has_interface_of_gloo, ..Inherited::default() };
        let list = worker(&job, &world, &rendezvous, 1, &inherited);
        let mut names = list.iter().map(|(name, _)| *name).filter(|it| it.ends_with("IFNAME"));
        assert!(names.by_ref().eq(set.iter().copied()), "what the user says stays");
    }
}

#[test]
fn the_security_level_is_set_only_where_the_job_has_one() {
    let of = |security| {
        let job = Job { security, ..job(1) };
        variables(&job, 0, &Inherited::default()).remove("DRUMLINE_SECURITY")
    };
    assert_eq!(of(None), None);
    assert_eq!(of(Some(drumline::auth::Level::Tls)).as_deref(), Some("tls"));
}

#[test]
fn omp_threads_are_the_users_choice_and_a_lone_worker_may_use_all_cores() {
    let limited = |ranks, has_omp| {
        let inherited = Inherited { has_omp, ..Inherited::default() };
        variables(&job(ranks), 0, &inherited).contains_key("OMP_NUM_THREADS")
    };
    assert!(limited(3, false) && !limited(3, true) && !limited(1, false));
}

#[test]
fn restartable_sequences_stay_unless_the_job_disables_them_and_the_user_has_not_named_them() {
    let of = |disables_rseq, tunables: &str| {
        let inherited = Inherited { glibc_tunables: tunables.to_owned(), ..Inherited::default() };
        let job = Job { disables_rseq, ..job(3) };
        variables(&job, 0, &inherited).remove("GLIBC_TUNABLES")
    };
    assert_eq!(of(false, ""), None);
    assert_eq!(of(true, "").as_deref(), Some("glibc.pthread.rseq=0"));
    let both = "glibc.malloc.check=3:glibc.pthread.rseq=0";
    assert_eq!(of(true, "glibc.malloc.check=3").as_deref(), Some(both));
    assert_eq!(of(true, "glibc.pthread.rseq=1"), None);
}
