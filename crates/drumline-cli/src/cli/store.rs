//! The store for programs that use torch, and how connections are protected.

use clap::Args;
use drumline::auth::Level;
use drumline_launch::TorchStore;

use super::names::{Names, Refusal};

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct StoreArgs {
    /// Host no store for programs that run torch: a job of one host then listens on no TCP port
    #[arg(long)]
    no_torch_store: bool,

    /// Who may use that store: `user` and `anyone` over loopback, `network` without any protection [default: user]
    #[arg(long, value_name = "WHO")]
    torch_store: Option<Who>,

    /// How TCP connections between ranks are protected: `auth` or `tls`; unless given, as
    /// DRUMLINE_SECURITY says
    #[arg(long, value_name = "LEVEL")]
    pub(super) security: Option<Level>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Who {
    /// Processes of this user, and of root
    User,
    /// Every process of this host
    Anyone,
    /// Every process that reaches the first host, at its true address
    Network,
}

impl StoreArgs {
    /// The store, if there is one, at the port of --master-port, else at `port`.
    pub(super) fn of(
        self,
        master_port: Option<u16>,
        port: u16,
        names: &Names,
    ) -> Result<Option<TorchStore>, Refusal> {
        let of_the_store =
            [master_port.map(|_| "master-port"), self.torch_store.map(|_| "torch-store")];
        match (self.no_torch_store, of_the_store.into_iter().flatten().next()) {
            (true, Some(option)) => {
                let text = format!(
                    "{} leaves out the store that {} is about: give one of the two",
                    names.of("no-torch-store"),
                    names.of(option)
                );
                Err(Refusal::of(text, [option, "no-torch-store"]))
            }
            (true, None) => Ok(None),
            (false, _) => {
                let port = master_port.unwrap_or(port);
                Ok(Some(match self.torch_store {
                    None | Some(Who::User) => TorchStore::User { port },
                    Some(Who::Anyone) => TorchStore::Anyone { port },
                    Some(Who::Network) => TorchStore::Network { port },
                }))
            }
        }
    }
}
