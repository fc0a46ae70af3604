//! What is refused before anything starts, and what the error says.

use super::*;

#[test]
fn contradictions_and_errors_say_what_to_write() {
    for (line, part) in [
        ("run", "PROGRAM"),
        ("run --nproc-per-node 0 x", "from 1 to 4096"),
        ("run --nproc-per-node 1000000 x", "from 1 to 4096"),
        (
            "run --nproc-per-node gpu x",
            "no GPU, or CUDA_VISIBLE_DEVICES and the like hide it; give a number",
        ),
        ("run --nnodes 2:1 x", "the smaller number comes first: 1:2"),
        ("run --nnodes 0 x", "MIN:MAX"),
        ("run --nnodes 2 x", "--nnodes 2 with --rdzv-backend static needs --master-addr HOST"),
        ("run --nnodes 2 --master-addr h x", "--node-rank N, the number of this one"),
        ("run --nnodes 2 --node-rank 1 x", "needs --master-addr HOST"),
        ("run --nnodes 2 --node-rank 2 --master-addr h x", "hosts have the numbers 0 to 1"),
        ("run --node-rank 1 x", "hosts have the numbers 0 to 0; --nnodes says"),
        ("run --nnodes 1:2 --node-rank 0 --master-addr h x", "write --rdzv-backend c10d"),
        ("run --nnodes 2 --node-rank 0 --master-addr h:5 x", "--master-port has the port"),
        (
            "run --nnodes 2 --node-rank 0 --rdzv-endpoint a:5 --master-port 6 x",
            "--master-port differs from --rdzv-endpoint a:5",
        ),
        (
            "run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint a --master-addr b x",
            "--master-addr differs from --rdzv-endpoint a",
        ),
        ("run --master-port 5 --rdzv-endpoint localhost:6 x", "--master-port differs from"),
        ("run --nnodes 2 --rdzv-backend c10d x", "needs --rdzv-endpoint HOST:29400"),
        ("run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:0 x", "must know the port"),
        ("run --nnodes 2 --node-rank 0 --master-addr h --master-port 0 x", "must know the port"),
        ("run --nnodes 2 --rdzv-backend file x", "needs --rdzv-endpoint PATH"),
        ("run --nnodes 2 --rdzv-backend etcd x", "needs --rdzv-endpoint HOST:2379"),
        ("run --nnodes 2 --rdzv-backend etcd --rdzv-endpoint e --master-port 5 x", "leave it out"),
        ("run --rdzv-backend etcd-v2 x", "write --rdzv-backend etcd, which speaks v3"),
        ("run --rdzv-backend zoo x", "static, drumline, file, etcd"),
        ("run --rdzv-endpoint a:b:c x", "--rdzv-endpoint: `a:b:c` is not HOST:PORT"),
        ("run --rdzv-id a/b x", "without `/`"),
        ("run --rdzv-conf join_timout=5 x", "is it `join_timeout`?"),
        (
            "run --standalone --nnodes 2 x",
            "--standalone says that this host is alone, and --nnodes",
        ),
        ("run --standalone --rdzv-endpoint h:5 x", "and --rdzv-endpoint that it is not"),
        ("run --standalone --rdzv-backend etcd x", "and --rdzv-backend that it is not"),
        ("run -m --no-python x", "--module and --no-python contradict each other"),
        ("run -m --run-path x", "--module and --run-path contradict each other"),
        ("run --run-path --no-python x", "--run-path and --no-python contradict each other"),
        ("run --tee 0:3,2:1 --nproc-per-node 2 x", "--tee: there is no local rank 2, only 0 to 1"),
        ("run --stdin 1 x", "--stdin: there is no local rank 1, only 0 to 0"),
        ("run --stdin all x", "give a local rank, or none"),
        ("run -r 1:1 x", "--redirects: there is no local rank 1"),
        ("run --local-ranks-filter 0,5 x", "--local-ranks-filter: there is no local rank 5"),
        ("run --tee 5 x", "0:3,4-7:1"),
        ("run --duplicate-stdout-filters a, x", "write a comma in a text as `,,`"),
        ("run --log-line-prefix-template ${ranc} x", "is it ${rank}?"),
        ("run --logs-specs mine x", "--log-dir, --redirects, --tee"),
        ("run --signals-to-handle SIGKILL x", "SIGKILL cannot be handled"),
        ("run --numa-binding core x", "core-complex"),
        ("run --nproc-per-node 2 --min-ranks 3 x", "--min-ranks: 3 should be a number from 1 to 2"),
        (
            "run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h --min-ranks 0 x",
            "--min-ranks: 0 should be a number from 1",
        ),
        ("run --min-ranks half x", "--min-ranks"),
        ("run --start-method thread x", "forkserver"),
        ("run --event-log-handler mine x", "null, console"),
        ("run --max-restarts=-1 x", "--max-restarts"),
        ("run --restart-delay 9s..1s x", "the shorter time comes first"),
        ("run --print-completion tcsh", "bash"),
        ("run --master-port 65536 x", "65535"),
        (
            "run --no-torch-store --master-port 5 x",
            "--no-torch-store leaves out the store that --master-port is about",
        ),
        ("run --no-torch-store --torch-store user x", "that --torch-store is about"),
        ("run --kill-after=-1s x", "30s"),
        ("run --kill-after 2days x", "30s"),
        ("run --kill-after 1e9 x", "24 hours"),
        ("run --security none x", "it should be auth or tls"),
        ("run --security integrity x", "tls, which protects against the same"),
        ("run --no-such-flag x", "--no-such-flag"),
        ("run --nproc-per-nodes 2 x", "--nproc-per-node"),
        ("run --log x", "--log"),
    ] {
        let error = asked(line, &[]).map(|asked| asked.job).unwrap_err();
        assert!(error.contains(part), "{line}: {error}");
    }
}

#[test]
fn errors_name_the_variable_that_gave_an_option() {
    for (line, variables, part) in [
        (
            "run --nnodes 2 --master-addr h x",
            &[("JOB_COMPLETION_INDEX", "2")][..],
            "2: hosts have the numbers 0 to 1",
        ),
        ("run x", &[("PET_NNODES", "none")], "in PET_NNODES: invalid value 'none'"),
        ("run x", &[("PET_RDZV_BACKEND", "zoo")], "in PET_RDZV_BACKEND: invalid value 'zoo'"),
        ("run --nnodes 2 x", &[("PET_STANDALONE", "1")], "PET_STANDALONE says that this host"),
        (
            "run x",
            &[("PET_NNODES", "2"), ("PET_RDZV_BACKEND", "c10d")],
            "PET_NNODES 2 with PET_RDZV_BACKEND needs",
        ),
    ] {
        let error = asked(line, variables).map(|asked| asked.job).unwrap_err();
        assert!(error.contains(part), "{line}: {error}");
    }
    let words = ["drumline", "run", "--nnodes", "1", "x"].map(OsString::from);
    let variables = [("PET_NNODES", "7"), ("PET_ROLE", "a"), ("PET_TEE", "1"), ("PATH", "/bin")];
    let (_, names) = parse(&words, &pairs(&variables), &Host::this()).unwrap();
    assert_eq!(names.listed(), "PET_ROLE=a, PET_TEE=1");
    // Other commands have no such variables.
    let words = ["drumline", "check"].map(OsString::from);
    let (_, names) = parse(&words, &pairs(&[("PET_ZZZ", "1")]), &Host::this()).unwrap();
    assert_eq!(names, Names::default());
}
