//! The store for programs that use torch, and how connections are protected.

use clap::Args;
use drumline::auth::Level;

use super::names::Names;

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct StoreArgs {
    /// Host no store for programs that run torch: a job of one host then listens on no TCP port
    #[arg(long)]
    no_torch_store: bool,

    /// Who may use that store, over loopback [default: user]
    #[arg(long, value_name = "WHO")]
    torch_store: Option<TorchStore>,

    /// How TCP connections between ranks are protected: `auth`, `integrity` or `tls`; unless given, as
    /// DRUMLINE_SECURITY says
    #[arg(long, value_name = "LEVEL")]
    pub(super) security: Option<Level>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum TorchStore {
    /// Processes of this user, and of root
    User,
    /// Every process of this host
    Anyone,
}

impl StoreArgs {
    /// The port of the store, if there is one: that of --master-port, else `port`.
    pub(super) fn port(
        self,
        master_port: Option<u16>,
        port: u16,
        names: &Names,
    ) -> Result<Option<u16>, String> {
        let of_the_store =
            [master_port.map(|_| "master-port"), self.torch_store.map(|_| "torch-store")];
        match (self.no_torch_store, of_the_store.into_iter().flatten().next()) {
            (true, Some(option)) => Err(format!(
                "{} leaves out the store that {} is about: give one of the two",
                names.of("no-torch-store"),
                names.of(option)
            )),
            (true, None) => Ok(None),
            (false, _) => Ok(Some(master_port.unwrap_or(port))),
        }
    }

    pub(super) fn takes_anyone(self) -> bool {
        matches!(self.torch_store, Some(TorchStore::Anyone))
    }
}
