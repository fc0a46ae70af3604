//! Options have two spellings, and variables may give them, as under torchrun: `--rdzv-id`, `--rdzv_id`,
//! `PET_RDZV_ID`.

use std::ffi::OsString;

use clap::{Arg, ArgAction, ArgMatches, Command, error::ErrorKind, parser::ValueSource};

use super::{
    names::{Names, PREFIX, Taken, variable},
    nearest::nearest,
};

/// The commands with torchrun's options.
const OF_TORCHRUN: [&str; 2] = ["run", "launch"];

/// What only a command line may ask for.
const NEVER: [&str; 3] = ["help", "version", "print-completion"];

/// Gives options their second spelling.
pub(super) fn with_both_spellings(command: Command) -> Command {
    OF_TORCHRUN.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, |below| {
            below.mut_args(|arg| match arg.get_long().map(|long| long.replace('-', "_")) {
                Some(other) if !arg.get_all_aliases().unwrap_or_default().contains(&&other[..]) => {
                    arg.alias(other)
                }
                _ => arg,
            })
        })
    })
}

/// What `arguments` say, and the variables of `environment` about options that they do not give, but for the options in
/// `left_out`.
pub(super) fn parse(
    command: &mut Command,
    arguments: &[OsString],
    environment: &[(OsString, OsString)],
    left_out: &[String],
) -> Result<(ArgMatches, Names), clap::Error> {
    let alone = command.try_get_matches_from_mut(arguments)?;
    let (name, given) = match alone.subcommand() {
        Some((name, given)) if OF_TORCHRUN.contains(&name) => (name, given),
        _ => return Ok((alone, Names::default())),
    };
    let mut variables: Vec<(String, &OsString)> = environment
        .iter()
        .filter_map(|(variable, value)| Some((variable.clone().into_string().ok()?, value)))
        .filter(|(variable, value)| variable.starts_with(PREFIX) && !value.is_empty())
        .collect();
    variables.sort();
    let (mut names, mut words) = (Names::default(), Vec::new());
    for (variable, value) in variables {
        let option = match option_of(command, name, &variable) {
            Ok(option) => option,
            Err(why) => {
                names.left_out.push(why);
                continue;
            }
        };
        let long = option.get_long().unwrap_or_default().to_owned();
        let is_typed =
            given.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine);
        if is_typed || left_out.contains(&long) {
            continue;
        }
        let word = match (option.get_action(), value.to_str()) {
            (ArgAction::SetTrue, Some("0")) => continue,
            (ArgAction::SetTrue, Some("1")) => format!("--{long}").into(),
            (ArgAction::SetTrue, _) => {
                return Err(refusal(command, name, &format!("{variable} is 0 or 1")));
            }
            _ => [format!("--{long}=").into(), value.clone()].into_iter().collect::<OsString>(),
        };
        check(command, name, &word)
            .map_err(|text| refusal(command, name, &format!("in {variable}: {text}")))?;
        words.push(word);
        names.taken.push(Taken { option: long, value: value.to_string_lossy().into_owned() });
    }
    // Behind `drumline run`.
    let (front, behind) = arguments.split_at(arguments.len().min(2));
    let matches = command.try_get_matches_from_mut([front, &words, behind].concat())?;
    Ok((matches, names))
}

/// The option of the command `name` that this variable gives.
fn option_of(command: &Command, name: &str, wanted: &str) -> Result<Arg, String> {
    let below = command.find_subcommand(name).into_iter();
    let options: Vec<(String, &Arg)> = below
        .flat_map(Command::get_arguments)
        .filter_map(|option| Some((option.get_long()?, option)))
        .filter(|(long, _)| !NEVER.contains(long))
        .map(|(long, option)| (variable(long), option))
        .collect();
    if let Some((_, option)) = options.iter().find(|(known, _)| known == wanted) {
        return Ok((*option).clone());
    }
    let bare = |variable: &'_ str| variable.strip_prefix(PREFIX).unwrap_or_default().to_owned();
    let known: Vec<String> = options.iter().map(|(known, _)| bare(known)).collect();
    Err(match nearest(&bare(wanted), known.iter().map(String::as_str)) {
        Some(known) => format!("{wanted} is the variable of no option; is it {PREFIX}{known}?"),
        None => format!("{wanted} is the variable of no option"),
    })
}

/// Whether the command understands this option. The error is the first paragraph of its own.
fn check(command: &mut Command, name: &str, option: &OsString) -> Result<(), String> {
    let words = ["drumline".as_ref(), name.as_ref(), option.as_os_str(), "program".as_ref()];
    command.try_get_matches_from_mut(words).map(|_| ()).map_err(|error| first_paragraph(&error))
}

/// The text of the error without the usage behind it.
pub(crate) fn first_paragraph(error: &clap::Error) -> String {
    let text = error.to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    first.strip_prefix("error: ").unwrap_or(first).to_owned()
}

/// The error that says `text` about the command `name`.
pub(super) fn refusal(command: &mut Command, name: &str, text: &str) -> clap::Error {
    let kind = ErrorKind::ValueValidation;
    match command.find_subcommand_mut(name) {
        Some(below) => below.error(kind, text),
        None => command.error(kind, text),
    }
}
