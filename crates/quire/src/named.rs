//! Enums whose variants have names that people see.

/// Makes an enum whose variants each have a name, and the list of all of them.
macro_rules! named {
    ($(#[$meta:meta])* pub enum $Enum:ident {
        $($(#[$doc:meta])* $Variant:ident = $name:literal,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(usize)]
        pub enum $Enum {
            $($(#[$doc])* $Variant,)*
        }

        impl $Enum {
            /// In the order of their numbers.
            pub const ALL: [$Enum; [$($name),*].len()] = [$($Enum::$Variant),*];

            /// Its name in reports.
            pub const fn name(self) -> &'static str {
                match self {
                    $($Enum::$Variant => $name,)*
                }
            }
        }
    };
}
pub(crate) use named;
