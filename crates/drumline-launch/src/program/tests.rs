use std::os::unix::fs::PermissionsExt;

use super::*;

#[test]
fn the_first_executable_of_the_path_wins() {
    let root = tempfile::tempdir().unwrap();
    for (directory, mode) in [("a", 0o644), ("b", 0o755), ("c", 0o755)] {
        let directory = root.path().join(directory);
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("train"), "").unwrap();
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(directory.join("train"), permissions).unwrap();
    }
    let path = |directories: &[&str]| {
        std::env::join_paths(directories.iter().map(|d| root.path().join(d))).ok()
    };
    let name = OsStr::new("train");
    assert_eq!(resolve(name, path(&["a", "b", "c"])).unwrap(), root.path().join("b/train"));
    assert_eq!(resolve(name, path(&["a"])).unwrap_err().exit_code(), 126);
    assert_eq!(resolve(name, path(&["missing"])).unwrap_err().exit_code(), 127);
    assert!(resolve(OsStr::new("sh"), None).is_ok());
}

#[test]
fn a_name_with_a_slash_is_not_searched_for() {
    let root = tempfile::tempdir().unwrap();
    let script = root.path().join("train.py");
    assert_eq!(resolve(script.as_os_str(), None).unwrap_err().exit_code(), 127);
    fs::write(&script, "").unwrap();
    let error = resolve(script.as_os_str(), None).unwrap_err();
    assert!(error.to_string().contains("python3"), "{error}");
    let error = resolve(root.path().as_os_str(), None).unwrap_err();
    assert!(error.to_string().contains("directory"), "{error}");
}

#[test]
fn scripts_and_modules_run_unbuffered_under_python() {
    use ProgramKind::{Exact, Module, Named, Script};
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name).into_os_string();
    for name in ["train.py", "train"] {
        fs::write(path(name), "").unwrap();
    }
    let words = |kind: ProgramKind, name: &OsStr| {
        let command = kind.command(name.into(), vec!["-x".into()], || "python".into());
        let (program, arguments) = command.unwrap();
        [vec![program], arguments].concat()
    };
    let (py, bare) = (path("train.py"), path("train"));
    let expected = |words: &[&OsStr]| words.iter().map(OsString::from).collect::<Vec<_>>();
    let [python, u, m, x] = ["python", "-u", "-m", "-x"].map(OsStr::new);
    assert_eq!(words(Named, &py), expected(&[python, u, &py, x]));
    assert_eq!(words(Named, &bare), expected(&[&bare, x]));
    assert_eq!(words(Script, &bare), expected(&[python, u, &bare, x]));
    assert_eq!(words(Exact, &py), expected(&[&py, x]));
    let module = OsStr::new("not.there");
    assert_eq!(words(Module, module), expected(&[python, u, m, module, x]));

    let missing = Named.command(path("none.py"), Vec::new(), || "python".into());
    assert_eq!(missing.unwrap_err().exit_code(), 127);
    let elsewhere = Named.command("none.py".into(), Vec::new(), || "python".into());
    let error = elsewhere.unwrap_err().to_string();
    assert!(error.contains("none.py") && error.contains("seen from /"), "{error}");
}

#[test]
fn the_interpreter_is_the_chosen_one_or_a_neighbour_or_that_of_the_path() {
    let root = tempfile::tempdir().unwrap();
    let (drumline, beside) = (root.path().join("drumline"), root.path().join("python3"));
    assert_eq!(python(None, Some(&drumline)), "python3");
    fs::write(&beside, "").unwrap();
    assert_eq!(python(None, Some(&drumline)), "python3", "not executable");
    fs::set_permissions(&beside, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(python(None, Some(&drumline)), beside);
    assert_eq!(python(Some("".into()), Some(&drumline)), beside);
    assert_eq!(python(Some("pypy3".into()), Some(&drumline)), "pypy3");
    assert_eq!(python(None, Some(Path::new("python3.11"))), "python3");
    assert_eq!(python(None, None), "python3");
}

#[test]
fn the_local_rank_is_put_into_arguments_as_often_as_it_is_named() {
    let not_utf8 = OsString::from_vec([b"\xff", LOCAL_RANK].concat());
    let arguments = ["${local_rank}${local_rank}x", "$$ ${rank} ${local_rank", ""].map(Into::into);
    let arguments = arguments.into_iter().chain([not_utf8]).collect();
    let job = Job { arguments, ..Job::new("train", std::num::NonZeroUsize::MIN) };
    let last = OsString::from_vec(b"\xff12".to_vec());
    let expected = ["1212x", "$$ ${rank} ${local_rank", ""].map(OsString::from);
    assert_eq!(arguments_of(&job, 12), [&expected[..], &[last]].concat());
}
