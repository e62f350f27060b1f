// The libraries that draw the page of `korch explain --html`, as one script; `make web` bundles it
// into src/korch/report/web/libraries.js. The page's own script is src/korch/report/web/page.js.
import {
  BarController, BarElement, CategoryScale, Chart, Filler, Legend, LinearScale, LineController,
  LineElement, LogarithmicScale, PointElement, ScatterController, Tooltip,
} from "chart.js";
import cytoscape from "cytoscape";
import dagre from "cytoscape-dagre";
import highlighter from "highlight.js/lib/core";
import python from "highlight.js/lib/languages/python";
import x86asm from "highlight.js/lib/languages/x86asm";

Chart.register(BarController, BarElement, CategoryScale, Filler, Legend, LinearScale,
  LineController, LineElement, LogarithmicScale, PointElement, ScatterController, Tooltip);
cytoscape.use(dagre);
highlighter.registerLanguage("python", python);
highlighter.registerLanguage("x86asm", x86asm);
globalThis.korchLibraries = { Chart, cytoscape, highlighter };
